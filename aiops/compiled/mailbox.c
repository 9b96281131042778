/* The client's half of an exchange by a mailbox: posts a push, and waits for the answer.
 *
 * It looks for the answer for a while, and then sleeps until the server wakes it. Between sleeps it
 * looks at the socket: something to be read there, its end, or a beat without an answer have the
 * push taken back, and the general path sends it by the socket. A push that the server has taken
 * cannot be taken back. The server answers it within the call in which it takes it; if it has not
 * done so after two beats, the connection counts as lost.
 */

#include "exchange.h"
#include "mailbox.h"

#ifdef HAS_MAILBOXES

#include <errno.h>
#include <poll.h>
#include <sched.h>

#define SLICE 20000000L  /* nanoseconds of one sleep */
#define BEAT 500000000LL /* aiops.client.sync.connection._BEAT */
#define CLOSE_LOOKS 64   /* before the processor is first yielded */

static inline void pause_a_bit(void)
{
#ifdef __x86_64__
    __builtin_ia32_pause();
#else
    __asm__ volatile("yield");
#endif
}

/* Return whether the present push is answered, and how. */
static int answered(const Exchange *self)
{
    uint32_t found = atomic_load(word(&self->mailbox, ANSWERED_AT));
    uint32_t how = found & 3;
    if (how == LENT && !self->alone) /* so small a model is not lent */
        return 0;
    return how && found == worded(self->posted, how) ? (int)how : 0;
}

/* Look for an answer for `budget` nanoseconds, as `Spin.look` does. */
static int look(Exchange *self, long long budget)
{
    int found;
    for (int looks = 0; looks < CLOSE_LOOKS; looks++, pause_a_bit())
        if ((found = answered(self)))
            return found;
    long long time = now(), until = time + budget, crowded = self->crowded_at_first;
    for (;; crowded = self->crowded) {
        long long before = time;
        sched_yield();
        if ((found = answered(self)))
            return found;
        time = now();
        if (time >= until || time - before >= crowded) {
            self->missed = 1;
            return 0;
        }
    }
}

/* Return whether the socket has something to be read, or has ended. */
static int has_come(const Exchange *self)
{
    struct pollfd seen = {.fd = self->fd, .events = POLLIN};
    return self->fd < 0 || poll(&seen, 1, 0) != 0;
}

/* Sleep until there is an answer. 0: there is none, and `sent` and `fault` say why; -1: the handler
 * of a signal has raised. */
static int sleep_until_answered(Exchange *self)
{
    Word *sleeps = word(&self->mailbox, CLIENT_SLEEPS_AT);
    Word *posted = word(&self->mailbox, POSTED_AT), *at = word(&self->mailbox, ANSWERED_AT);
    long long begun = now();
    for (int ended = 0;;) {
        uint32_t before = atomic_load(at), mine = worded(self->posted, POSTED);
        atomic_store(sleeps, 1);
        int found = answered(self);
        long slept = found ? 0 : wait_for(at, before, SLICE);
        int why = errno;
        atomic_store(sleeps, 0);
        if (found || (found = answered(self)))
            return found;
        if (slept < 0 && why == EINTR && signalled(self))
            return -1;
        long long waited = now() - begun;
        if (ended || waited > 2 * BEAT) {
            self->fault = CLOSED; /* it was taken, and may have been applied */
            return 0;
        }
        int open = atomic_load(word(&self->mailbox, OPEN_AT)) == 1;
        if (open && waited < BEAT && !has_come(self))
            continue;
        if (atomic_compare_exchange_strong(posted, &mine, worded(self->posted, WITHDRAWN))) {
            self->sent = 0;
            self->posted--; /* the next push has this number */
            return 0;
        }
        char byte;
        ended = self->fd < 0 || recv(self->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0;
    }
}

/* Take the answer out of the mailbox. 1: it is one; 0: the general path is to look at it, if there
 * is room for it beside the parameters, or else to ask again on another connection. */
static int take_answer(Exchange *self, unsigned char *target, uint64_t id, int how)
{
    const unsigned char *memory = self->mailbox.buf;
    const unsigned char *payload = memory + PAYLOAD_AT + in_pages(self->nbytes);
    unsigned char *room = self->room.buf;
    Py_ssize_t head = self->acks->head.len; /* of the only form */
    memcpy(room, memory + ANSWER_AT, (size_t)head);
    int is_one = matches(self, self->acks, id);
    if (!is_one && self->room.len == head) {
        self->fault = CLOSED;
        return 0;
    }
    self->lent = how == LENT;
    if (self->lent && !is_one) {
        self->fault = CLOSED;
        return 0;
    }
    if (self->lent)
        memcpy(self->place, memory + PLACE_AT, sizeof self->place);
    else if (!is_one || target != NULL)
        memcpy(is_one ? target : room + head, payload, (size_t)self->nbytes);
    self->placed = is_one;
    self->received = head + self->nbytes;
    return is_one;
}

/* Return whether the pieces behind the header may be copied to the mailbox one by one: none lies in
 * it, but where it belongs. */
static int may_be_copied(const Exchange *self, const struct iovec *pieces, int count)
{
    const char *begin = (const char *)self->mailbox.buf + PAYLOAD_AT, *to = begin;
    for (int index = 1; index < count; index++) {
        const char *from = pieces[index].iov_base;
        if (from != to && from < begin + self->pushed && begin < from + pieces[index].iov_len)
            return 0;
        to += pieces[index].iov_len;
    }
    return 1;
}

int exchange_by_mailbox(Exchange *self, const struct iovec *pieces, int count,
                        unsigned char *target, uint64_t id, long long budget)
{
    const Py_buffer *memory = &self->mailbox;
    if (memory->buf == NULL || self->fd < 0 || atomic_load(word(memory, OPEN_AT)) != 1 ||
        !may_be_copied(self, pieces, count))
        return -2;
    char *to = (char *)memory->buf + PAYLOAD_AT;
    memcpy((char *)memory->buf + PUSH_AT, pieces[0].iov_base, pieces[0].iov_len);
    for (int index = 1; index < count; to += pieces[index++].iov_len)
        if (to != pieces[index].iov_base) /* it was not written there */
            memcpy(to, pieces[index].iov_base, pieces[index].iov_len);
    self->posted = (self->posted + 1) & (UINT32_MAX >> 2);
    self->sent = self->push.len + self->pushed;
    atomic_store(word(memory, POSTED_AT), worded(self->posted, POSTED));
    if (atomic_load(word(memory, SERVER_SLEEPS_AT))) {
        const uint64_t one = 1;
        if (write(self->bell, &one, sizeof one) < 0) /* it does not listen any more */
            budget = 0;
    }
    int found = budget > 0 ? look(self, budget) : answered(self);
    if (!found)
        found = sleep_until_answered(self);
    return found == HERE || found == LENT ? take_answer(self, target, id, found)
           : found < 0                    ? -1
                                          : 0;
}

PyObject *give_back(PyObject *object, PyObject *number)
{
    Exchange *self = (Exchange *)object;
    unsigned long returned = PyLong_AsUnsignedLong(number);
    if (PyErr_Occurred())
        return NULL;
    if (self->mailbox.buf == NULL || self->fd < 0) /* with the connection all is given back */
        Py_RETURN_TRUE;
    atomic_store(word(&self->mailbox, RETURNED_AT), (uint32_t)returned & (UINT32_MAX >> 2));
    return PyBool_FromLong(atomic_load(word(&self->mailbox, OPEN_AT)) == 1);
}

PyObject *use_mailbox(PyObject *object, PyObject *given)
{
    Exchange *self = (Exchange *)object;
    Py_buffer memory;
    int bell, alone;
    if (self->busy) {
        PyErr_SetString(PyExc_RuntimeError, "an exchange has one caller");
        return NULL;
    }
    if (!PyArg_ParseTuple(given, "w*ip", &memory, &bell, &alone))
        return NULL;
    if (self->increments || self->pushed > in_pages(self->nbytes) ||
        !is_mailbox(&memory, self->nbytes, self->push.len, self->acks->head.len)) {
        PyBuffer_Release(&memory);
        PyErr_SetString(PyExc_ValueError, "this memory is no mailbox for these messages");
        return NULL;
    }
    PyBuffer_Release(&self->mailbox);
    self->mailbox = memory;
    self->bell = bell;
    self->alone = alone;
    self->posted = 0;
    Py_RETURN_NONE;
}

#else

int exchange_by_mailbox(Exchange *self, const struct iovec *pieces, int count,
                        unsigned char *target, uint64_t id, long long budget)
{
    (void)self, (void)pieces, (void)count, (void)target, (void)id, (void)budget;
    return -2;
}

PyObject *give_back(PyObject *self, PyObject *number)
{
    (void)self, (void)number;
    Py_RETURN_FALSE;
}

PyObject *use_mailbox(PyObject *self, PyObject *given)
{
    (void)self, (void)given;
    PyErr_SetString(PyExc_NotImplementedError, "there are no mailboxes here");
    return NULL;
}

#endif
