"""A server's report as Prometheus metrics: values in, metric families out."""
