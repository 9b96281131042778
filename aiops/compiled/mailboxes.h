/* What the files of a server's mailboxes share. */

#ifndef AIOPS_MAILBOXES_H
#define AIOPS_MAILBOXES_H

#include "links.h"
#include "mailbox.h"

#ifdef HAS_MAILBOXES

#define MOST_LENT 2 /* answers of one mailbox whose parameters are lent at a time */

typedef struct {
    uint32_t number; /* of the push */
    uint32_t before; /* what its client had given back when it was lent */
    long long id;    /* of the answer */
} LentAnswer;

typedef struct {
    PyObject *link, *answers, *shortcut; /* NULL: the place is free */
    PyObject *lender; /* an aiops.serving.peer.Peer; None: parameters are copied */
    LentAnswer lent[MOST_LENT];
    int lent_count;
    Py_buffer memory;
    int bell;       /* what its client wakes the server with */
    int told;       /* its client was told to ring */
    int waits;      /* its push cannot be taken now */
    uint32_t taken; /* the number of the push that was taken last */
} Mailbox;

typedef struct {
    PyObject_HEAD
    int fd; /* an epoll instance of the bells */
    Mailbox *boxes;
    uint32_t places, next;  /* of those, the one that is looked at next */
    uint32_t resting, rest; /* as of aiops.net.busy_poll.Spin */
    long long served;       /* exchanges that were answered in mailboxes */
    long long look;         /* nanoseconds to look for a push before sleeping, and how much longer */
    long long longer;       /* with models that take a client as long to copy */
#define COPY_RATE 4         /* bytes a nanosecond */
} Mailboxes;

/* Take out the oldest lent answer of a mailbox, if its client has given it back. */
int pop_returned(Mailbox *box, long long *id);

/* Release the parameters of an answer. */
void release_answer(PyObject *lender, long long id);

/* Forget a mailbox: its client goes by the socket, also with what it has posted. */
void forget(Mailboxes *self, Mailbox *box);

/* Release the parameters that clients have given back, so that they may be written to. */
void take_returned(Mailboxes *self);

/* Answer what has been posted; returns whether to be called again soon. */
PyObject *answer_posted(PyObject *self, PyObject *nothing);

#endif
#endif
