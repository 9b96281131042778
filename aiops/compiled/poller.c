/* Reads connections in turn: an epoll instance whose descriptor is one reader of the event loop.
 *
 * One call of the loop takes all that is ready from its connection to its answer. What is no push
 * that is answered at once goes to the connection's `MessageTransport`, as if the loop had read it:
 * one such message ends the call, since how long it takes is not known here, and so does a
 * millisecond. `aiops.net.transport` pauses the loop's own reading of these connections, and takes
 * one back (`remove`) before its descriptor is closed, or when it is not to be read from.
 */

#ifdef __linux__

#include "poller.h"
#include <errno.h>
#include <sys/socket.h>

/* Tell a connection that its socket has failed. */
static int failed(PyObject *link, int number)
{
    errno = number;
    PyErr_SetFromErrno(PyExc_OSError);
    return broken(link);
}

/* Return what a method of the transport without arguments says, as a number; -1 with an error. */
static long long ask(PyObject *transport, int method)
{
    long long found = -1;
    PyObject *said = PyObject_CallMethodObjArgs(transport, names[method], NULL);
    if (said != NULL && (found = PyLong_AsLongLong(said)) < 0 && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "a transport says less than nothing");
    Py_XDECREF(said);
    return PyErr_Occurred() ? -1 : found;
}

/* Return where a push may be received: in the head buffer, if nothing else is under way. */
static char *head_of(const Polled *polled, Py_ssize_t *room)
{
    Answers *answers = (Answers *)polled->answers;
    long long begin, end;
    if (answers == NULL || !takes_by(polled->link, polled->shortcut, answers) ||
        !find_push(answers->part[PART_wire], &begin, &end) || end >= answers->head.len)
        return NULL;
    *room = answers->head.len - (Py_ssize_t)end;
    return (char *)answers->head.buf + end;
}

/* Answer what has come in the head buffer. 1: it was a push, 0: it goes the general way, -1. */
static int answer_push(Poller *self, const Polled *polled, PyObject *received)
{
    PyObject *link = polled->link, *transport;
    Answers *answers = (Answers *)polled->answers;
    if (!lacks(link, MessageTransport__out) || !lacks(link, MessageTransport__full) ||
        !lacks(link, MessageTransport__unread) || !lacks(link, MessageTransport__received) ||
        !lacks(link, MessageTransport__closing))
        return 0;
    transport = Py_NewRef(get(link, MessageTransport_transport));
    long long waiting = ask(transport, NAME_get_write_buffer_size);
    if (waiting < 0) {
        Py_DECREF(transport);
        return -1;
    }
    answers->fd = waiting ? -1 : polled->fd;
    PyObject *found = answer((PyObject *)answers, received);
    answers->fd = -1;
    int done = found == NULL ? -1 : found != Py_None;
    if (done > 0 && (found == Py_True || PyObject_Size(found) > 0)) {
        PyObject *size = /* `found` may be the rest of it alone */
            PyLong_FromSsize_t(answers->size ? answers->size : PyObject_Size(found));
        self->served++;
        if (size == NULL || add(link, MessageTransport_pumped, size) < 0 ||
            (found != Py_True && tell(transport, "write", found, NULL) < 0))
            done = -1;
        Py_XDECREF(size);
    }
    Py_DECREF(transport);
    Py_XDECREF(found);
    return done;
}

/* Read from a connection once. 0: the call goes on, 1: it ends, -1 with an error. */
static int serve(Poller *self, const Polled *polled)
{
    Py_buffer view = {0};
    Py_ssize_t room = 0, count;
    PyObject *link = polled->link, *transport = get(link, MessageTransport_transport);
    if (transport == Py_None || ask(transport, NAME_is_closing) != 0)
        return PyErr_Occurred() ? broken(link) : 0; /* its descriptor may be another's already */
    char *into = head_of(polled, &room);
    int fast = into != NULL;
    if (!fast) {
        PyObject *buffer = PyObject_CallMethod(link, "get_buffer", "i", -1);
        int taken = buffer == NULL ? -1 : PyObject_GetBuffer(buffer, &view, PyBUF_WRITABLE);
        Py_XDECREF(buffer);
        if (taken < 0)
            return broken(link);
        into = view.buf;
        room = view.len;
    }
    do
        count = recv(polled->fd, into, (size_t)room, MSG_DONTWAIT);
    while (count < 0 && errno == EINTR);
    int error = errno;
    if (!fast)
        PyBuffer_Release(&view);
    if (count < 0)
        return error == EAGAIN || error == EWOULDBLOCK ? 0 : failed(link, error);
    if (count == 0) /* the transport finds the end itself */
        return tell(link, "give_back", NULL, NULL) == 0 ? 0 : broken(link);
    PyObject *received = PyLong_FromSsize_t(count);
    if (received == NULL)
        return broken(link); /* or these bytes would be missing */
    int done = fast ? answer_push(self, polled, received) : 0;
    if (done < 0)
        done = broken(link);
    else if (done == 0)
        done = tell(link, "buffer_updated", received, fast ? Py_False : Py_True) == 0 ||
                       broken(link) == 0
                   ? 1
                   : -1;
    else
        done = 0;
    Py_DECREF(received);
    return done;
}

/* Return whether a connection is ready, `first` or after others. What has become so meanwhile is
 * found here, which costs less than another turn of the event loop; one that is alone has just been
 * answered, and is not looked at again. */
static int has_next(Poller *self, int first)
{
    if (self->next < self->ready)
        return 1;
    self->next = self->ready = 0;
    if (self->fd >= 0 && (first || self->count > 1))
        self->ready = epoll_wait(self->fd, self->events, BATCH, 0);
    return self->ready > 0;
}

PyObject *ready(PyObject *object, PyObject *nothing)
{
    (void)nothing;
    Poller *self = (Poller *)object;
    long long until = now() + MOST_TIME;
    for (int first = 1; has_next(self, first); first = 0) {
        uint64_t which = self->events[self->next++].data.u64;
        uint32_t place = (uint32_t)which, turn = (uint32_t)(which >> 32);
        if (place >= self->places || self->links[place].link == NULL ||
            self->links[place].turn != turn)
            continue; /* it was removed meanwhile */
        Polled polled = self->links[place];
        Py_INCREF(polled.link);
        Py_XINCREF(polled.answers);
        Py_XINCREF(polled.shortcut);
        int done = serve(self, &polled);
        Py_DECREF(polled.link);
        Py_XDECREF(polled.answers);
        Py_XDECREF(polled.shortcut);
        if (done < 0)
            return NULL;
        if (done > 0 || now() >= until)
            break;
    }
    Py_RETURN_NONE;
}

#endif
