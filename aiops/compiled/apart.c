/* The steady exchange of a client of asyncio, in two calls: `push` and `pull`.
 *
 * `aiops/client/asyncio/short_way.py` calls them between the turns of its event loop, whose
 * transport reads from the same socket only within one. `push` does not wait, and `pull` no longer
 * than it is told: what the socket does not take now, and what of the answer does not come in time,
 * the transport moves. It also learns of an end of the connection by itself.
 */

#define _GNU_SOURCE /* ppoll */
#include "exchange.h"
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <time.h>

#define SECOND 1000000000LL
#define MISSED_LOOK 1 /* it looked for an answer in vain, */
#define MISSED_NAP 2  /* and slept for it in vain: aiops.client.asyncio.short_way */

PyObject *push(PyObject *object, PyObject *const *given, Py_ssize_t given_count)
{
    Exchange *self = (Exchange *)object;
    long long numbers[NUMBERS];
    if (given_count != NUMBERS + 1 || self->busy) {
        PyErr_SetString(PyExc_RuntimeError, "push takes 5 arguments, and one caller");
        return NULL;
    }
    if (!take_arguments(self, given + 1, NUMBERS, numbers))
        return NULL;
    Py_buffer views[VIEWS];
    struct iovec pieces[VIEWS + 1];
    int taken = 0, fits = (self->busy = 1, take_views(self, given[0], views, &taken));
    if (fits > 0) {
        int count = compose(self, views, taken, numbers, pieces);
        struct msghdr message = {.msg_iov = pieces, .msg_iovlen = (size_t)count};
        self->thread = PyEval_SaveThread();
        fits = encode_all(self, views, PyDict_CheckExact(given[0]));
        Py_ssize_t sent = fits ? sendmsg(self->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT) : 0;
        self->sent = sent > 0 ? sent : 0;
        PyEval_RestoreThread(self->thread);
    }
    self->busy = 0;
    while (taken > 0)
        PyBuffer_Release(&views[--taken]);
    return fits < 0 ? NULL : PyBool_FromLong(fits);
}

/* Sleep until there is something to receive, `budget` nanoseconds at most; return whether there is. */
static int sleep_for_it(const Exchange *self, long long budget)
{
#ifdef __linux__
    struct pollfd one = {.fd = self->fd, .events = POLLIN};
    struct timespec wait = {.tv_sec = budget / SECOND, .tv_nsec = budget % SECOND};
    return ppoll(&one, 1, &wait, NULL) > 0;
#else
    (void)self, (void)budget; /* `poll` knows milliseconds alone */
    return 0;
#endif
}

/* Receive an answer: look for it, then sleep for it, for so many nanoseconds. Return 1 if it is whole,
 * 0 if it is another one, -1 if some of it, or all, is still to come. */
static int receive(Exchange *self, unsigned char *target, uint64_t id, long long look,
                   long long nap)
{
    Py_ssize_t beside = self->room.len;
    long long time = now(), until = time + look, crowded = self->crowded_at_first, before;
    int looks = look > 0;
    for (;;) {
        unsigned char *room = self->room.buf;
        int begun = self->received > 0; /* and so its form has been found */
        Py_ssize_t head = self->found->head.len, answer = head + self->found->nbytes;
        /* A larger answer's payload is received in the parameters; they are a mixture until it ends. */
        int direct = begun && beside == head;
        unsigned char *into = direct ? target + (self->received - head) : room + self->received;
        Py_ssize_t wanted = begun ? answer - self->received : beside;
        Py_ssize_t count = recv(self->fd, into, (size_t)wanted, MSG_DONTWAIT);
        if (count > 0) {
            self->received += count;
            if (!begun && !find_form(self, id))
                return 0;
            if (self->received == self->found->head.len + self->found->nbytes)
                return !self->increments || apply_increments(self, target);
            time = now();
            continue;
        }
        if (count == 0 || (errno != EAGAIN && errno != EWOULDBLOCK))
            return -1;
        if (looks) {
            sched_yield();
            before = time;
            time = now();
            looks = time < until && time - before < crowded;
            crowded = self->crowded;
            if (looks)
                continue;
            self->missed = self->received == 0 ? MISSED_LOOK : 0;
        }
        if (nap > 0 && sleep_for_it(self, nap)) {
            before = time;
            time = now();
            nap -= time - before;
            continue;
        }
        if (nap != 0 && self->received == 0)
            self->missed |= MISSED_NAP;
        return -1;
    }
}

PyObject *pull(PyObject *object, PyObject *const *given, Py_ssize_t given_count)
{
    Exchange *self = (Exchange *)object;
    long long numbers[3]; /* the push's id, and the nanoseconds to look for, and to sleep */
    if (given_count != 4 || self->busy) {
        PyErr_SetString(PyExc_RuntimeError, "pull takes 4 arguments, and one caller");
        return NULL;
    }
    Py_buffer target;
    if (!take_arguments(self, given + 1, 3, numbers) ||
        PyObject_GetBuffer(given[0], &target, PyBUF_WRITABLE) < 0)
        return NULL;
    int done = -2;
    PyObject *found = NULL;
    if (target.len != self->nbytes)
        PyErr_SetString(PyExc_ValueError, "the parameters have another length than the model");
    else {
        self->busy = 1;
        self->thread = PyEval_SaveThread();
        done = receive(self, target.buf, (uint64_t)numbers[0], numbers[1], numbers[2]);
        PyEval_RestoreThread(self->thread);
        self->busy = 0;
    }
    Py_ssize_t head = self->found->head.len;
    if (done > 0 && (found = values(self)) != NULL && self->room.len > head && !self->placed)
        memcpy(target.buf, (unsigned char *)self->room.buf + head, (size_t)self->nbytes);
    PyBuffer_Release(&target);
    return done == 0 ? Py_NewRef(Py_False) : done == -1 ? Py_NewRef(Py_None) : found;
}
