/* The type `Poller`: the table of the connections that it reads. */

#ifdef __linux__

#include "poller.h"
#include <errno.h>
#include <unistd.h>

#define MOST_LINKS (1 << 20) /* connections, at most */

/* Forget a connection. */
static void forget(Poller *self, Polled *polled)
{
    struct epoll_event none = {0};
    if (self->fd >= 0)
        epoll_ctl(self->fd, EPOLL_CTL_DEL, polled->fd, &none); /* it may be closed already */
    PyObject *held[] = {polled->answers, polled->shortcut, polled->link};
    *polled = (Polled){.fd = -1, .turn = polled->turn + 1};
    self->count--;
    for (int index = 0; index < 3; index++)
        Py_XDECREF(held[index]); /* a finalizer may have the table grow */
}

static PyObject *add_link(PyObject *object, PyObject *given)
{
    Poller *self = (Poller *)object;
    PyObject *link, *shortcut;
    uint32_t place;
    int fd;
    if (!PyArg_ParseTuple(given, "OiO", &link, &fd, &shortcut))
        return NULL;
    if (!is_of(link, MessageTransport_class) || self->fd < 0) {
        PyErr_SetString(PyExc_ValueError, "this connection cannot be polled");
        return NULL;
    }
    if (!find_place((void **)&self->links, &self->places, sizeof *self->links, MOST_LINKS, &place))
        return NULL;
    Polled *polled = &self->links[place];
    struct epoll_event event = {.events = EPOLLIN,
                                .data.u64 = (uint64_t)polled->turn << 32 | place};
    if (epoll_ctl(self->fd, EPOLL_CTL_ADD, fd, &event) < 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    polled->fd = fd;
    polled->link = Py_NewRef(link);
    self->count++;
    polled->shortcut = Py_NewRef(shortcut);
    polled->answers = answers_of(shortcut);
    return PyLong_FromUnsignedLong(place);
}

static PyObject *remove_link(PyObject *object, PyObject *number)
{
    Poller *self = (Poller *)object;
    unsigned long place = PyLong_AsUnsignedLong(number);
    if (PyErr_Occurred())
        return NULL;
    if (place < self->places && self->links[place].link != NULL)
        forget(self, &self->links[place]);
    Py_RETURN_NONE;
}

static PyObject *close_it(PyObject *object, PyObject *nothing)
{
    (void)nothing;
    Poller *self = (Poller *)object;
    for (uint32_t place = 0; place < self->places; place++)
        if (self->links[place].link != NULL)
            forget(self, &self->links[place]);
    if (self->fd >= 0)
        close(self->fd);
    self->fd = -1;
    self->ready = self->next = 0;
    Py_RETURN_NONE;
}

static int traverse(PyObject *object, visitproc visit, void *arg)
{
    Poller *self = (Poller *)object;
    Py_VISIT(Py_TYPE(object));
    for (uint32_t place = 0; place < self->places; place++) {
        Py_VISIT(self->links[place].link);
        Py_VISIT(self->links[place].answers);
        Py_VISIT(self->links[place].shortcut);
    }
    return 0;
}

static int clear(PyObject *object)
{
    Py_XDECREF(close_it(object, NULL));
    return 0;
}

static void end(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    clear(object);
    PyMem_Free(((Poller *)object)->links);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyObject *make(PyTypeObject *type, PyObject *given, PyObject *names)
{
    (void)given, (void)names;
    Poller *self = (Poller *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL)
        return NULL;
    if ((self->fd = epoll_create1(EPOLL_CLOEXEC)) >= 0)
        return (PyObject *)self;
    PyErr_SetFromErrno(PyExc_OSError);
    Py_DECREF(self);
    return NULL;
}

static PyMethodDef methods[] = {
    {"add", add_link, METH_VARARGS, "See _core.pyi."},
    {"remove", remove_link, METH_O, "See _core.pyi."},
    {"ready", ready, METH_NOARGS, "See _core.pyi."},
    {"close", close_it, METH_NOARGS, "See _core.pyi."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"fd", T_INT, offsetof(Poller, fd), READONLY, NULL},
    {"served", T_LONGLONG, offsetof(Poller, served), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot type_slots[] = {
    {Py_tp_new, make}, {Py_tp_dealloc, end}, {Py_tp_traverse, traverse}, {Py_tp_clear, clear},
    {Py_tp_methods, methods}, {Py_tp_members, members}, {0, NULL},
};

static PyType_Spec type_spec = {
    "aiops.compiled._core.Poller", sizeof(Poller), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    type_slots,
};

int add_poller(PyObject *module)
{
    return PyModule_AddObjectRef(module, "Poller", PyType_FromSpec(&type_spec));
}

#else

#include "core.h"

int add_poller(PyObject *module)
{
    return PyModule_AddObjectRef(module, "Poller", Py_None);
}

#endif
