/* What the files of the client's half share: one connection's exchanges. */

#ifndef AIOPS_EXCHANGE_H
#define AIOPS_EXCHANGE_H

#include "core.h"
#include <sys/uio.h>

#define MOST_BYTES (1 << 30)      /* of a model: one of steady exchanges has far fewer */
#define NUMBERS 4                 /* of a push: its id, sequence number, and two versions */
#define PARTS 256                 /* of a push, at most: aiops.codecs.whole_gradient.MOST */
#define VERSIONS 5                /* of an answer: its id, and four that are at most LARGEST */
#define AGE 3                     /* of those: the version of the tensors, if it has parts */
#define ACKS 16                   /* forms of answers: aiops.client.steady_increments.MOST */
#define SLOTS 8                   /* of an answer: those, a mean, and at most two statistics */
#define VIEWS 256                 /* aiops.client.steady._VIEWS */
#define RECEIVE (512 << 10)       /* aiops.client.sync.shard_socket.RECEIVE */
#define CLOSED (-1)               /* a fault that is no errno: the peer has closed the connection */

typedef struct {
    Py_ssize_t begin, width;
    int kind; /* 'u': an unsigned integer, 'f': a float, 's': bytes, 'n': there is none */
} Slot;

/* Loops that check a payload, and add it to a tensor. */
typedef _Bool (*Check)(int64_t size, const void *first, const void *second);
typedef void (*Add)(int64_t size, const void *first, const void *second, void *out);

/* A payload of a coded answer: an aiops.client.coded_answer.AnswerPiece. */
typedef struct {
    Check check; /* NULL: it is copied */
    Add add;
    Py_ssize_t start, stop, begin, nbytes, second;
} AnswerPiece;

/* A form of answers. */
typedef struct {
    Py_buffer head, varies; /* the header in its frame; 0xff for each byte that varies */
    Py_ssize_t slot_count;
    Slot slots[SLOTS];
    Py_ssize_t *ages, age_count; /* where the slot AGE stands again */
    Py_ssize_t nbytes;           /* behind the header: of the model, or of a region of pieces */
    AnswerPiece *pieces;
    Py_ssize_t piece_count;
} Ack;

/* A loop that encodes a tensor, which Numba has compiled: aiops.codecs.block_codec.Entries. */
typedef _Bool (*Encode)(int64_t size, const void *values, void *rest, void *before, void *first,
                        void *second);

/* A payload of a coded gradient: an aiops.client.coded_gradient.CodedPiece. */
typedef struct {
    Encode encode; /* NULL: its tensors are copied */
    Py_ssize_t first, last, start, begin, nbytes, second;
    Py_buffer rest, before; /* of as many bytes as the tensor */
} CodedPiece;

typedef struct {
    PyObject_HEAD
    Py_buffer push; /* its header in its frame */
    Py_buffer room; /* for an answer; if it is as long as the header, for that alone */
    Ack *acks;      /* the forms of answers; of raw ones one */
    Py_ssize_t ack_count;
    const Ack *found;          /* that of the answer in `room` */
    int increments;            /* whether answers are coded */
    Py_ssize_t nbytes, pushed; /* of the model; and behind the header of a push */
    Py_ssize_t numbers[NUMBERS], *ages, age_count; /* the last number stands there, too */
    PyObject *tensors, *ndarray; /* ((name, dtype, shape), ...), and numpy's type */
    long long crowded_at_first, crowded; /* nanoseconds, as of aiops.net.busy_poll */
    volatile int fd;             /* -1 once closed, perhaps by another thread: read at each call */
    int busy, fault, missed;
    Py_ssize_t sent, received;
    Py_buffer region; /* into which gradients are encoded; no bytes: they travel raw */
    CodedPiece *pieces;
    Py_ssize_t piece_count;
    PyThreadState *thread;
    Py_buffer mailbox; /* where messages lie instead of going by the socket; no bytes: there is none */
    int bell, placed;  /* what wakes its server; whether an answer is in the parameters already */
    int alone;         /* whether no exchange goes by the socket */
    uint32_t posted;   /* messages that were posted in it */
    int lent;          /* whether the last answer's parameters lie at a place: */
    uint64_t place[2]; /* a segment, and an offset in it */
} Exchange;

/* Whether the header in `room` is the answer to a push, and of this form. */
int matches(const Exchange *self, const Ack *ack, uint64_t id);

/* Find the form of the answer of which `received` bytes are in `room`. 0: it is none, or not known yet. */
int find_form(Exchange *self, uint64_t id);

/* The values of its header, as `Template.values` returns them; of coded answers also the form's number. */
PyObject *values(const Exchange *self);

/* Bring the target up to date with the increments in `room`. 0: they are none, and it is as it was. */
int apply_increments(Exchange *self, unsigned char *target);

/* Take the forms of answers. 0: they are none, perhaps with an error. */
int take_acks(Exchange *self, PyObject *given);

/* Let go of them. */
void forget_acks(Exchange *self);

/* Take numbers that are at least 0, and note that nothing has been moved yet. 0: an error is set. */
int take_arguments(Exchange *self, PyObject *const *given, int count, long long *numbers);

/* Take views of gradients, a dict by name or one buffer. Return 1; 0: they do not fit, -1: an error
 * is set. Of an array that is not contiguous no view can be had, so it does not fit. */
int take_views(const Exchange *self, PyObject *gradients, Py_buffer *views, int *taken);

/* Write the numbers of a push; return how many pieces it has, VIEWS + 1 at most. */
int compose(Exchange *self, const Py_buffer *views, int taken, const long long *numbers,
            struct iovec *pieces);

/* Run the handlers of signals that have come; return whether one has raised. errno stays EINTR. */
int signalled(Exchange *self);

/* Push by a mailbox and take the answer, as `transfer` does. -2: it is not to be used now. `target`
 * NULL: parameters stay where they lie. */
int exchange_by_mailbox(Exchange *self, const struct iovec *pieces, int count,
                        unsigned char *target, uint64_t id, long long budget);

/* Take the payloads of coded gradients; None: they are raw. 0: they are none, perhaps with an error. */
int take_coded(Exchange *self, PyObject *given);

/* Let go of them. */
void forget_coded(Exchange *self);

/* Encode a gradient, of which there is a view of each tensor or one of all, into the region. 0: a
 * value of it cannot be, and the encoders are as they were. */
int encode_all(Exchange *self, const Py_buffer *views, int by_name);

/* Have the encoders be as before the last gradient. */
void take_back(Exchange *self);

/* Have all answers up to a number be the server's again; see _core.pyi. */
PyObject *give_back(PyObject *self, PyObject *number);

/* Give an exchange its mailbox, or take it away. */
PyObject *use_mailbox(PyObject *self, PyObject *given);

#endif
