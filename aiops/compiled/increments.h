/* Increments of the delta replica, and the forms of answers that are made of them. */

#ifndef AIOPS_INCREMENTS_H
#define AIOPS_INCREMENTS_H

#include "core.h"
#include <sys/uio.h>

#define COUNTED 7       /* values of an answer, at most, beside the versions of its parts */
#define MOST_STEPS 256  /* increments of an answer, at most: aiops.store.delta_replica._MOST */
#define MOST_PIECES 256 /* of a model, and parts of an answer, at most */
#define PREFIX 5        /* bytes before a payload */

/* A payload of an answer: bytes of an increment, or of the replica. */
typedef struct {
    Py_ssize_t source, begin, nbytes; /* the number of the increment; below 0: the replica */
} Segment;

/* An answer that has a number of increments. */
typedef struct {
    PyObject *header;             /* bytes, with the prefix before them; NULL: it is not known */
    Py_ssize_t at[COUNTED];       /* of the id, two versions, staleness, its mean, two statistics */
    Py_ssize_t *ages, age_count;  /* where the version of each part stands */
    Segment *segments;
    char *prefixes;                          /* of each of their payloads */
    Py_ssize_t segment_count, size;          /* and the bytes of all of the answer */
    PyObject *whole, *overhead, *payload;    /* integers: those bytes, and of which kind they are */
    PyObject *parts;                         /* of `Ledger.brought` */
} Form;

/* Return the form of an answer with this many increments; NULL: it is not known. */
const Form *form_of(PyObject *increments, Py_ssize_t count);

/* Find the payloads of an answer, and the prefix before each. 0: an increment or the replica is too
 * short. `regions`: a tuple of the increments' bytes. */
int find_payloads(const Form *form, PyObject *regions, const Py_buffer *replica,
                  struct iovec *pieces);

/* Whether an object is an `Increments`. */
int is_increments(PyObject *object);

#endif
