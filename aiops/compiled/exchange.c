/* The client's half of the steady exchange: from a gradient to the parameters in one call.
 *
 * `aiops/client/steady.py` and `aiops/client/sync/connection.py` are the specification: without it
 * a client does the same by them, byte by byte. `Exchange.run` fills in the four numbers of a push,
 * sends header and gradients by one `sendmsg`, waits for the answer, and compares its header with
 * the learnt one. If it matches, the parameters are in their place, and the answer's numbers are
 * returned. If not, nothing is decided here: what has come lies where Python would have received
 * it, and `sent`, `received` and `fault` say how far it got. So errors, other messages, timeouts
 * and moved servers are the general path's alone. Bounds:
 *   lengths   are fixed when an Exchange is made; no byte of a peer's is ever a length.
 *   integers  of an answer are read from slots of at most 8 bytes, and compared with LARGEST.
 *   time      each system call ends after a beat at the latest, by the socket's own SO_RCVTIMEO and
 *             SO_SNDTIMEO; then, or when a signal has cut it, the general path looks at the clock.
 *
 * The interpreter's lock is released from before the first system call until after the last. Only
 * this object, which `busy` keeps from a second caller, and the target are written meanwhile.
 */

#include "exchange.h"
#include <errno.h>
#include <sched.h>
#include <sys/socket.h>
#include <time.h>

static PyObject *dtype_name, *shape_name;

/* Run the handlers of signals that have come; return whether one has raised. errno stays EINTR. */
int signalled(Exchange *self)
{
    PyEval_RestoreThread(self->thread);
    int raised = PyErr_CheckSignals();
    self->thread = PyEval_SaveThread();
    errno = EINTR;
    return raised < 0;
}

/* Receive; return the bytes that have come, or -1: errno says why, EINTR that a handler raised. A
 * call that a signal has cut is not repeated, which would begin its beat anew: it counts as one. */
static Py_ssize_t receive(Exchange *self, void *into, Py_ssize_t wanted, int flags)
{
    Py_ssize_t count = recv(self->fd, into, (size_t)wanted, flags);
    if (count < 0 && errno == EINTR && !signalled(self))
        errno = EAGAIN;
    return count;
}

/* Look for an answer for `budget` nanoseconds before sleeping for it, as `Spin.look` does. */
static Py_ssize_t look(Exchange *self, void *into, Py_ssize_t wanted, long long budget)
{
    long long time = now(), until = time + budget, crowded = self->crowded_at_first;
    for (;; crowded = self->crowded) {
        Py_ssize_t count = receive(self, into, wanted, MSG_DONTWAIT);
        if (count >= 0 || (errno != EAGAIN && errno != EWOULDBLOCK))
            return count;
        long long before = time;
        sched_yield();
        time = now();
        if (time >= until || time - before >= crowded) {
            self->missed = 1;
            return receive(self, into, wanted, 0);
        }
    }
}

/* Note why a call has moved too few bytes; return -1 if a handler has raised, else 0. That a beat
 * has passed, or a signal has cut a transfer, is no fault. */
static int stopped(Exchange *self, Py_ssize_t count)
{
    if (count < 0 && errno == EINTR)
        return -1;
    if (count == 0)
        self->fault = CLOSED;
    else if (count < 0 && errno != EAGAIN && errno != EWOULDBLOCK)
        self->fault = errno;
    return 0;
}

/* Send a push and receive its answer. Return 1 if that is whole and matches, 0 if the general path
 * is to go on, -1 if the handler of a signal has raised. */
static int transfer(Exchange *self, struct msghdr message, unsigned char *target, uint64_t id,
                    long long budget)
{
    Py_ssize_t count;
    count = sendmsg(self->fd, &message, MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR && !signalled(self))
        errno = EAGAIN;
    self->sent = count > 0 ? count : 0;
    if (count != self->push.len + self->pushed)
        return stopped(self, count); /* the general path sends the rest */

    unsigned char *room = self->room.buf;
    count = budget > 0 ? look(self, room, self->room.len, budget)
                       : receive(self, room, self->room.len, 0);
    if (count <= 0)
        return stopped(self, count);
    self->received = count;
    if (!find_form(self, id))
        return 0;
    Py_ssize_t head = self->found->head.len, answer = head + self->found->nbytes;
    /* A larger answer's payload is received in the parameters; they are a mixture until it ends. */
    unsigned char *payload = self->room.len > head ? room + head : target;
    while (self->received < answer) {
        Py_ssize_t wanted = answer - self->received;
        wanted = wanted < RECEIVE ? wanted : RECEIVE;
        count = receive(self, payload + (self->received - head), wanted, MSG_WAITALL);
        self->received += count > 0 ? count : 0;
        if (count < wanted)
            return stopped(self, count);
    }
    return !self->increments || apply_increments(self, target);
}

/* Return whether an attribute of an array is this one, -1 with an error set. */
static int has(PyObject *array, PyObject *name, PyObject *wanted)
{
    PyObject *found = PyObject_GetAttr(array, name);
    int same = found == NULL ? -1 : PyObject_RichCompareBool(found, wanted, Py_EQ);
    Py_XDECREF(found);
    return same;
}

int take_views(const Exchange *self, PyObject *gradients, Py_buffer *views, int *taken)
{
    int by_name = PyDict_CheckExact(gradients), fits;
    Py_ssize_t total = 0, count = by_name ? PyTuple_Size(self->tensors) : 1;
    if (count > VIEWS || (by_name && PyDict_Size(gradients) != count))
        return 0;
    for (*taken = 0; *taken < count; ++*taken) {
        PyObject *tensor = by_name ? PyTuple_GetItem(self->tensors, *taken) : NULL;
        PyObject *array = by_name ? PyDict_GetItemWithError(gradients, PyTuple_GetItem(tensor, 0))
                                  : gradients;
        if (array == NULL)
            return PyErr_Occurred() ? -1 : 0;
        Py_INCREF(array); /* a finalizer that runs meanwhile may take it out of the dict */
        fits = !by_name || (PyObject *)Py_TYPE(array) == self->ndarray;
        for (int index = 1; by_name && fits > 0 && index < 3; index++)
            fits = has(array, index == 1 ? dtype_name : shape_name, PyTuple_GetItem(tensor, index));
        if (fits > 0 && PyObject_GetBuffer(array, &views[*taken], PyBUF_SIMPLE) < 0)
            fits = (PyErr_Clear(), 0);
        Py_DECREF(array);
        if (fits <= 0)
            return fits;
        total += views[*taken].len;
    }
    return total == self->nbytes;
}

int compose(Exchange *self, const Py_buffer *views, int taken, const long long *numbers,
            struct iovec *pieces)
{
    for (int index = 0; index < NUMBERS; index++)
        write_number((char *)self->push.buf + self->numbers[index], (uint64_t)numbers[index]);
    for (Py_ssize_t index = 0; index < self->age_count; index++)
        write_number((char *)self->push.buf + self->ages[index], (uint64_t)numbers[NUMBERS - 1]);
    pieces[0] = (struct iovec){self->push.buf, (size_t)self->push.len};
    if (self->piece_count) {
        pieces[1] = (struct iovec){self->region.buf, (size_t)self->region.len};
        return 2;
    }
    for (int index = 0; index < taken; index++)
        pieces[index + 1] = (struct iovec){views[index].buf, (size_t)views[index].len};
    return taken + 1;
}

int take_arguments(Exchange *self, PyObject *const *given, int count, long long *numbers)
{
    self->sent = self->received = self->fault = self->missed = self->placed = self->lent = 0;
    for (int index = 0; index < count; index++) {
        numbers[index] = PyLong_AsLongLong(given[index]);
        if (numbers[index] < 0) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_ValueError, "a number of an exchange is at least 0");
            return 0;
        }
    }
    return 1;
}

PyObject *run(PyObject *object, PyObject *const *given, Py_ssize_t given_count)
{
    Exchange *self = (Exchange *)object;
    long long numbers[NUMBERS + 1]; /* and the nanoseconds to look for */
    if (given_count != NUMBERS + 3 || self->busy) {
        PyErr_SetString(PyExc_RuntimeError, "an exchange takes 7 arguments, and one caller");
        return NULL;
    }
    if (!take_arguments(self, given + 2, NUMBERS + 1, numbers))
        return NULL;
    Py_buffer target = {.len = self->nbytes}, views[VIEWS];
    struct iovec pieces[VIEWS + 1];
    int stays = given[1] == Py_None; /* where the server has it, by a mailbox alone */
    if (stays && !self->alone)
        return Py_NewRef(Py_False);
    if (!stays && PyObject_GetBuffer(given[1], &target, PyBUF_WRITABLE) < 0)
        return NULL;
    int taken = 0, done = -1, fits = -1;
    PyObject *found = NULL;
    if (target.len != self->nbytes)
        PyErr_SetString(PyExc_ValueError, "the parameters have another length than the model");
    else
        fits = (self->busy = 1, take_views(self, given[0], views, &taken));
    if (fits > 0) {
        int count = compose(self, views, taken, numbers, pieces);
        struct msghdr message = {.msg_iov = pieces, .msg_iovlen = (size_t)count};
        self->thread = PyEval_SaveThread();
        fits = encode_all(self, views, PyDict_CheckExact(given[0]));
        if (fits)
            done = exchange_by_mailbox(self, pieces, count, target.buf, (uint64_t)numbers[0],
                                       numbers[NUMBERS]);
        if (done == -2 && self->alone) {
            take_back(self);
            fits = 0;
        } else if (done == -2)
            done = transfer(self, message, target.buf, (uint64_t)numbers[0], numbers[NUMBERS]);
        PyEval_RestoreThread(self->thread);
    }
    self->busy = 0;
    Py_ssize_t head = self->found->head.len;
    if (done > 0 && (found = values(self)) != NULL && self->room.len > head && !self->placed)
        memcpy(target.buf, (unsigned char *)self->room.buf + head, (size_t)self->nbytes);
    while (taken > 0)
        PyBuffer_Release(&views[--taken]);
    if (!stays)
        PyBuffer_Release(&target);
    return fits == 0 ? Py_NewRef(Py_False) : done == 0 ? Py_NewRef(Py_None) : found;
}

static void end(PyObject *object)
{
    Exchange *self = (Exchange *)object;
    PyTypeObject *type = Py_TYPE(object);
    Py_buffer *buffers[] = {&self->push, &self->room, &self->mailbox};
    for (int index = 0; index < 3; index++)
        PyBuffer_Release(buffers[index]);
    forget_acks(self);
    forget_coded(self);
    PyMem_Free(self->ages);
    Py_XDECREF(self->tensors);
    Py_XDECREF(self->ndarray);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

/* Take note of where the numbers of a push lie; return whether that is in its header. */
static int take_numbers(Exchange *self, PyObject *given)
{
    Py_ssize_t count = PyTuple_Size(given), more = count - NUMBERS;
    if (more < 0 || more >= PARTS ||
        (self->ages = PyMem_Calloc((size_t)more + 1, sizeof *self->ages)) == NULL)
        return 0;
    self->age_count = more;
    for (Py_ssize_t index = 0; index < count; index++) {
        Py_ssize_t at = PyLong_AsSsize_t(PyTuple_GetItem(given, index));
        if (at < 0 || at > self->push.len - 8)
            return 0;
        *(index < NUMBERS ? &self->numbers[index] : &self->ages[index - NUMBERS]) = at;
    }
    return 1;
}

static PyObject *make(PyTypeObject *type, PyObject *given, PyObject *names)
{
    int fd;
    PyObject *acks, *tensors, *array, *numbers, *coded;
    Exchange *self = (Exchange *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL || !PyArg_ParseTuple(
            given, "iw*O!O!w*nO!O(LL)O", &fd, &self->push, &PyTuple_Type, &numbers,
            &PyTuple_Type, &acks, &self->room, &self->nbytes, &PyTuple_Type, &tensors, &array, &self->crowded_at_first, &self->crowded, &coded)) {
        Py_XDECREF((PyObject *)self);
        return NULL;
    }
    self->fd = fd;
    self->tensors = Py_NewRef(tensors);
    self->ndarray = Py_NewRef(array);
    int sound = names == NULL && self->nbytes >= 0 && self->nbytes <= MOST_BYTES &&
                take_numbers(self, numbers) && take_acks(self, acks) && take_coded(self, coded);
    for (Py_ssize_t index = 0; sound && index < PyTuple_Size(tensors); index++) {
        PyObject *tensor = PyTuple_GetItem(tensors, index);
        sound = PyTuple_Check(tensor) && PyTuple_Size(tensor) == 3;
    }
    if (sound)
        return (PyObject *)self;
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "these are not the templates of a steady exchange");
    Py_DECREF(self);
    return NULL;
}

static PyMethodDef methods[] = {
    {"run", (PyCFunction)(void (*)(void))run, METH_FASTCALL, "Exchange; see _core.pyi."},
    {"use_mailbox", use_mailbox, METH_VARARGS, "See _core.pyi."},
    {"give_back", give_back, METH_O, "See _core.pyi."},
    {"carry", (PyCFunction)(void (*)(void))carry, METH_FASTCALL, "See _core.pyi."},
    {"push", (PyCFunction)(void (*)(void))push, METH_FASTCALL, "See _core.pyi."},
    {"pull", (PyCFunction)(void (*)(void))pull, METH_FASTCALL, "See _core.pyi."},
    {"push_usual", (PyCFunction)(void (*)(void))push_usual, METH_FASTCALL, "See _core.pyi."},
    {"pull_usual", (PyCFunction)(void (*)(void))pull_usual, METH_FASTCALL, "See _core.pyi."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"fd", T_INT, offsetof(Exchange, fd), 0, NULL},
    {"fault", T_INT, offsetof(Exchange, fault), READONLY, NULL},
    {"missed", T_INT, offsetof(Exchange, missed), READONLY, NULL},
    {"sent", T_PYSSIZET, offsetof(Exchange, sent), READONLY, NULL},
    {"received", T_PYSSIZET, offsetof(Exchange, received), READONLY, NULL},
    {"posted", T_UINT, offsetof(Exchange, posted), READONLY, NULL},
    {"lent", T_INT, offsetof(Exchange, lent), READONLY, NULL},
    {"segment", T_ULONGLONG, offsetof(Exchange, place[0]), READONLY, NULL},
    {"offset", T_ULONGLONG, offsetof(Exchange, place[1]), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot type_slots[] = {
    {Py_tp_new, make}, {Py_tp_dealloc, end}, {Py_tp_methods, methods}, {Py_tp_members, members},
    {0, NULL},
};

static PyType_Spec type_spec = {
    "aiops.compiled._core.Exchange", sizeof(Exchange), 0, Py_TPFLAGS_DEFAULT, type_slots,
};

int add_exchange(PyObject *module)
{
    PyObject *type = PyType_FromSpec(&type_spec);
    dtype_name = PyUnicode_InternFromString("dtype");
    shape_name = PyUnicode_InternFromString("shape");
    if (type == NULL || dtype_name == NULL || shape_name == NULL)
        return -1;
    return PyModule_AddObjectRef(module, "Exchange", type);
}
