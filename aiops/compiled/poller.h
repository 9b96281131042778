/* What the files of the poller share: its connections, and the events that it has seen of them. */

#ifndef AIOPS_POLLER_H
#define AIOPS_POLLER_H

#include "links.h"
#include <sys/epoll.h>

#define BATCH 64 /* events of one look */

typedef struct {
    PyObject *link, *answers, *shortcut; /* NULL: the place is free */
    int fd;
    uint32_t turn; /* counts the connections that have had this place */
} Polled;

typedef struct {
    PyObject_HEAD
    int fd;
    Polled *links;
    uint32_t places, count; /* of which `count` are taken */
    long long served; /* exchanges that were answered without the event loop's transports */
    struct epoll_event events[BATCH];
    int ready, next; /* of `events`: how many there are, and the one whose turn it is */
} Poller;

/* Called by the event loop when a connection is ready. */
PyObject *ready(PyObject *self, PyObject *nothing);

#endif
