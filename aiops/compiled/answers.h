/* What the files of the server's half share: the object that answers one connection's exchanges. */

#ifndef AIOPS_ANSWERS_H
#define AIOPS_ANSWERS_H

#include "fields.h"
#include "increments.h"

#define PUSHED 4    /* numbers of a push: its id, sequence number, and two versions */
#define ANSWERED 8  /* values of an answer, at most: with two statistics */
#define SECTIONS 4  /* of a model: one for each dtype */
#define SCALARS 32  /* of a rule, at most */
#define STATES 8    /* arrays of a rule's state, at most */
#define REMEMBERED 64 /* aiops.wire.messages.REMEMBERED */
#define EXACT 1024    /* aiops.engine.staleness.EXACT */
#define RATES 16      /* learning rates, by staleness, that are kept in view */
#define MEMORY 64     /* aiops.engine.staleness._MEMORY */
#define LIMIT 1e18    /* aiops.store.finite_guard.LIMIT */
#define SCALE 16777216.0 /* aiops.kernels.interface.STATISTIC_SCALE */

/* The objects that an `Answers` is made of: attributes of the object it is given; and those by which
 * it answers without `EventDispatcher.exchange`, given later. */
#define PARTS(X)                                                                                  \
    X(steady) X(general) X(template) X(wire) X(member) X(store) X(pool) X(updates) X(held)        \
    X(maker) X(collected) X(warnings) X(closure) X(guard) X(even) X(histogram) X(recent) X(pace)  \
    X(policy) X(apply) X(gain) X(kernels) X(masters) X(states) X(spans) X(compiled_kernel)        \
    X(gradient) X(update) X(units) X(concatenate) X(push_parts) X(recorded) X(zeros)              \
    X(increments) X(replica) X(delta) X(follow) X(regions) X(answer_coded)
#define SERVER_PARTS(X)                                                                           \
    X(dispatcher) X(runner) X(run_state) X(persistence) X(busy_poll) X(clock) X(exchange) X(failed)

#define PART(name) PART_##name,
enum { PARTS(PART) ENGINE_PARTS, BEFORE = ENGINE_PARTS - 1, SERVER_PARTS(PART) PART_COUNT };
#undef PART

typedef struct {
    Py_ssize_t begin, width;
    int sign; /* whether an integer is signed */
} PushSlot;

typedef struct {
    Py_ssize_t nbytes, itemsize; /* of a section, and of an element */
    uint64_t mask, limit;        /* as of aiops.kernels.scan: the magnitude, and the first unfit one */
} Surveyed;

/* A rule's loop: the arguments are `aiops.kernels.numba_source.DIRECT`. */
typedef void (*Direct)(int64_t count, int64_t size, const int64_t *lo, const int64_t *hi,
                       const int64_t *src, const double *step, const double *more, double factor,
                       const void *base, const void *grad, void *target, void *state_0,
                       void *state_1, void *state_2, void *state_3, void *state_4, void *state_5,
                       void *state_6, void *state_7, const void *constants, int64_t *sums);

typedef struct {
    PyObject *kernel; /* whose loop it is; NULL: it is not known, or has none */
    Direct run;
    Py_ssize_t count; /* tensors */
    Py_buffer lo, hi, src, constants;
} Loop;

/* A loop that checks a payload and decodes it: aiops.codecs.block_codec.Entries. */
typedef _Bool (*Decode)(int64_t size, const void *first, const void *second, void *out);

/* A payload of a coded gradient: an aiops.codecs.whole_gradient.GradientPiece. */
typedef struct {
    Decode decode; /* NULL: its values are raw */
    Py_ssize_t begin, nbytes, start, stop, second;
} Piece;

typedef struct {
    PyObject *array; /* learning rates, and a view of them while they are known */
    Py_buffer view;
} Rates;

typedef struct {
    PyObject_HEAD
    PyObject *part[PART_COUNT]; /* None where there is none */
    PyObject *peer, *one, *number_of[5]; /* integers: see `make` */
    Py_buffer head, form, varies, answer;
    Py_ssize_t nbytes, cost, section_count;
    Py_ssize_t region; /* bytes of a push behind its form: those of the model, if it is raw */
    Py_ssize_t between, *ages, age_count; /* prefixes in it; where its version stands, too */
    Piece *pieces; /* of a coded one */
    Py_ssize_t piece_count;
    Py_buffer decoded; /* the gradient that it is decoded into */
    PushSlot pushed[PUSHED];
    Py_ssize_t answer_at[ANSWERED], vbars_width;
    int answer_count, scheduled, scalar_count, has_statistic;
    Py_ssize_t tensors;
    int64_t *sums; /* of the last update, by tensor; and one more */
    Loop loops[SECTIONS];
    Rates rates[RATES];
    long long parameters, answered; /* exchanges that were answered here */
    long long direct;               /* of these, by the addresses of kernels */
    char *header; /* room for one of an answer */
    int kept; /* of the last exchange: whether what its answer promises is kept already */
    Py_ssize_t size; /* of the last answer, in bytes, if it was made here; else 0 */
    int fd; /* the socket that an answer may be sent on at once; below 0: none */
    char *header_at, *payload_at; /* or the memory that it is to be left in; NULL: none */
    const char *payload_from; /* where a push's payload lies, if not in `head`; else NULL */
    char *payload_to;         /* where in `head` it belongs */
    long long id;             /* of the last push that was answered here */
    Surveyed sections[SECTIONS];
} Answers;

/* Of `number_of`: bytes of a push beside its payloads, of the model, of an answer beside that, of all
 * of an answer, and of the payloads of a push. */
enum { PUSH_OVERHEAD, PAYLOAD, ANSWER_OVERHEAD, ANSWER_SIZE, PUSH_PAYLOAD, NUMBERS_KEPT };

/* An exchange under way. */
typedef struct {
    long long number[PUSHED]; /* id, seq, have, base */
    long long level, version, staleness;
    double now, largest; /* the time, and the largest magnitude of the gradient */
    const char *data;    /* the gradient */
    const char *region;  /* as it has come */
} Pushed;

/* Find the largest magnitude of a gradient; return whether all of its values are fit. */
int survey(const Answers *self, const char *data, double *largest);

/* Return whether float32s are fit. */
int are_fit(const char *data, Py_ssize_t nbytes);

/* Take the payloads of coded gradients; None: they are raw. 0: they are none, perhaps with an error. */
int take_pieces(Answers *self, PyObject *given);

/* Let go of them. */
void forget_pieces(Answers *self);

/* Decode the region of a push: `WholeGradient.decode`, and survey what of it is raw. 0: it is none, or
 * a value is not fit. */
int decode_all(const Answers *self, const char *region);

/* aiops.engine.steady: what is changed by an exchange that has passed all conditions. Returns the
 * fields of the acknowledgement, or NULL with an error set. `steps` and `scalars` are of the update.
 */
PyObject *carry_out(Answers *self, const Pushed *push, PyObject *now, PyObject *record,
                    PyObject *steps, PyObject *scalars);

/* Return whether the connection's accounts have rows for these messages, as they have after one. */
int has_accounts(const Answers *self, PyObject *row[2]);

/* Have the payload of a push be in the head buffer, wherever it lies. */
void bring_payload(Answers *self);

/* Copy the parameters to memory of `nbytes`; -1: an error is set. */
int copy_parameters(const Answers *self, char *to);

/* Return the answer to an exchange that is carried out, or what of it is not sent; True: nothing. */
PyObject *answered(Answers *self, const Pushed *push, PyObject *said, PyObject *received);

/* Whether the answers are coded. */
static inline int is_coded(const Answers *self)
{
    return self->part[PART_increments] != Py_None;
}

/* Update all sections by the loops of their kernels, from one room of parameters into another, or in
 * place. 1; 0: one of them has none, or arrays are of another form, and nothing is changed; -1: an
 * error is set. */
int run_loops(Answers *self, const Pushed *push, PyObject *base, PyObject *room, PyObject *steps,
              PyObject *scalars);

/* Return the sums that `run_loops` has left, as an array. */
PyObject *sums_of(const Answers *self);

/* Let go of a kernel. */
void forget_kernel(Loop *loop);

/* Fix whether the current version has readers: `Store.freeze`. Returns it; -1: an error is set. */
int freeze(const Answers *self);

/* What an update came to. */
typedef struct {
    int leased;         /* whether the version before it had readers */
    PyObject *ticket;   /* its number */
    PyObject *sums;     /* None, if `run_loops` has left them */
    PyObject *followed; /* the result of the replica's step; None: it took none */
} Outcome;

/* Record an exchange, before it is answered: in the journal of a `KeptState`, or in what else has a
 * method `exchanged`. -1: an error is set. */
int record_it(const Answers *self, const Pushed *push, PyObject *now, PyObject *record,
              const Outcome *outcome);

/* Return whether the answer to the last exchange need not wait for its row: `Recorder.hold`. */
int may_leave(PyObject *kept);

/* Return the CRC-32 of bytes behind others whose CRC is given: `zlib.crc32`. */
uint32_t crc_of(uint32_t crc, const void *data, size_t size);

/* Copy bytes, and return their CRC-32. */
uint32_t copy_with_crc(char *to, const void *data, size_t size);

/* Answer a push if `received` bytes complete it, as `Steady.exchange` does. If `fd` is one, the
 * answer is sent there, as far as it can be, and the rest is returned; True: all was sent. `state`:
 * the server's `KeptState`, or None; where the answer has to wait for it, all of it is returned. */
PyObject *exchange(Answers *self, PyObject *received, PyObject *now, PyObject *record,
                   PyObject *state);

/* Answer as `EventDispatcher.exchange` does; returns as `exchange`. */
PyObject *answer(PyObject *self, PyObject *received);

/* Whether an object is an `Answers`. */
int is_answers(PyObject *object);

#endif
