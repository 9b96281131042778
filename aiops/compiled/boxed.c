/* The type `Mailboxes`: the table of those that a server answers in. */

#include "mailboxes.h"

#ifdef HAS_MAILBOXES

#include <sys/epoll.h>

#define MOST_BOXES (1 << 16)

void forget(Mailboxes *self, Mailbox *box)
{
    struct epoll_event none = {0};
    if (self->fd >= 0)
        epoll_ctl(self->fd, EPOLL_CTL_DEL, box->bell, &none);
    atomic_store(word(&box->memory, OPEN_AT), 0);
    wake(word(&box->memory, ANSWERED_AT));
    close(box->bell);
    long long id;
    Mailbox was = *box;
    *box = (Mailbox){.bell = -1};
    while (pop_returned(&was, &id)) /* others are given back by the socket */
        release_answer(was.lender, id);
    PyBuffer_Release(&was.memory);
    Py_DECREF(was.answers);
    Py_DECREF(was.shortcut);
    Py_DECREF(was.lender);
    Py_DECREF(was.link); /* a finalizer may have the table grow */
}

static PyObject *add_box(PyObject *object, PyObject *given)
{
    Mailboxes *self = (Mailboxes *)object;
    PyObject *link, *shortcut, *answers, *lender;
    Py_buffer memory;
    uint32_t place;
    int bell;
    if (!PyArg_ParseTuple(given, "OOw*iO", &link, &shortcut, &memory, &bell, &lender))
        return NULL;
    answers = answers_of(shortcut);
    const Answers *made = (const Answers *)answers;
    if (answers == NULL || self->fd < 0 ||
        !is_of(link, MessageTransport_class) || is_coded(made) ||
        made->region > in_pages(made->nbytes) ||
        !is_mailbox(&memory, made->nbytes, made->form.len, made->answer.len)) {
        PyErr_SetString(PyExc_ValueError, "this memory is no mailbox for this connection");
        goto failed;
    }
    if (!find_place((void **)&self->boxes, &self->places, sizeof *self->boxes, MOST_BOXES, &place))
        goto failed;
    Mailbox *box = &self->boxes[place];
    struct epoll_event event = {.events = EPOLLIN | EPOLLET, .data.u32 = place};
    if (epoll_ctl(self->fd, EPOLL_CTL_ADD, bell, &event) < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        goto failed;
    }
    *box = (Mailbox){.link = Py_NewRef(link), .answers = answers, .shortcut = Py_NewRef(shortcut),
                     .lender = Py_NewRef(lender), .memory = memory, .bell = bell, .told = 1};
    if (self->longer < made->nbytes / COPY_RATE)
        self->longer = made->nbytes / COPY_RATE;
    atomic_store(word(&memory, SERVER_SLEEPS_AT), 1);
    atomic_store(word(&memory, OPEN_AT), 1);
    return PyLong_FromUnsignedLong(place);
failed:
    Py_XDECREF(answers);
    PyBuffer_Release(&memory);
    return NULL;
}

static PyObject *remove_box(PyObject *object, PyObject *number)
{
    Mailboxes *self = (Mailboxes *)object;
    unsigned long place = PyLong_AsUnsignedLong(number);
    if (PyErr_Occurred())
        return NULL;
    if (place < self->places && self->boxes[place].link != NULL)
        forget(self, &self->boxes[place]);
    Py_RETURN_NONE;
}

static PyObject *close_all(PyObject *object, PyObject *nothing)
{
    (void)nothing;
    Mailboxes *self = (Mailboxes *)object;
    for (uint32_t place = 0; place < self->places; place++)
        if (self->boxes[place].link != NULL)
            forget(self, &self->boxes[place]);
    if (self->fd >= 0)
        close(self->fd);
    self->fd = -1;
    Py_RETURN_NONE;
}

/* Let go of all of them in a fork, where they are the parent's. */
static PyObject *leave_all(PyObject *object, PyObject *nothing)
{
    (void)nothing;
    Mailboxes *self = (Mailboxes *)object;
    for (uint32_t place = 0; place < self->places; place++)
        self->boxes[place].link = NULL; /* it is not freed: what else refers to it is as it was */
    self->fd = -1; /* its number is another file's already */
    Py_RETURN_NONE;
}

static int traverse(PyObject *object, visitproc visit, void *arg)
{
    Mailboxes *self = (Mailboxes *)object;
    Py_VISIT(Py_TYPE(object));
    for (uint32_t place = 0; place < self->places; place++) {
        if (self->boxes[place].link == NULL)
            continue;
        Py_VISIT(self->boxes[place].link);
        Py_VISIT(self->boxes[place].answers);
        Py_VISIT(self->boxes[place].shortcut);
        Py_VISIT(self->boxes[place].lender);
    }
    return 0;
}

static int clear(PyObject *object)
{
    Py_XDECREF(close_all(object, NULL));
    return 0;
}

static void end(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    clear(object);
    PyMem_Free(((Mailboxes *)object)->boxes);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyObject *make(PyTypeObject *type, PyObject *given, PyObject *names)
{
    Mailboxes *self = (Mailboxes *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL)
        return NULL;
    self->fd = -1;
    self->rest = 1;
    if (names == NULL && PyArg_ParseTuple(given, "L", &self->look)) {
        if ((self->fd = epoll_create1(EPOLL_CLOEXEC)) >= 0)
            return (PyObject *)self;
        PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_DECREF(self);
    return NULL;
}

static PyObject *take_returned_method(PyObject *object, PyObject *nothing)
{
    (void)nothing;
    take_returned((Mailboxes *)object);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"add", add_box, METH_VARARGS, "See _core.pyi."},
    {"remove", remove_box, METH_O, "See _core.pyi."},
    {"answer", answer_posted, METH_NOARGS, "See _core.pyi."},
    {"take_returned", take_returned_method, METH_NOARGS, "See _core.pyi."},
    {"forked", leave_all, METH_NOARGS, "See _core.pyi."},
    {"close", close_all, METH_NOARGS, "See _core.pyi."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"fd", T_INT, offsetof(Mailboxes, fd), READONLY, NULL},
    {"served", T_LONGLONG, offsetof(Mailboxes, served), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot type_slots[] = {
    {Py_tp_new, make}, {Py_tp_dealloc, end}, {Py_tp_traverse, traverse}, {Py_tp_clear, clear},
    {Py_tp_methods, methods}, {Py_tp_members, members}, {0, NULL},
};

static PyType_Spec type_spec = {
    "aiops.compiled._core.Mailboxes", sizeof(Mailboxes), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, type_slots,
};

int add_mailboxes(PyObject *module)
{
    return PyModule_AddObjectRef(module, "Mailboxes", PyType_FromSpec(&type_spec));
}

#else

int add_mailboxes(PyObject *module)
{
    return PyModule_AddObjectRef(module, "Mailboxes", Py_None);
}

#endif
