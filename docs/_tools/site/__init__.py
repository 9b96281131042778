"""The documentation as a site (``make site``): its pages, and the links between them."""
