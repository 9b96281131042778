/* Counts a push, and writes its answer: `Connection.answered`, and `CodedAnswers.answer` where the
 * answer is coded, and its form known. As much of it is sent at once as the socket takes.
 */

#include "answers.h"
#include <sys/socket.h>
#include <sys/uio.h>

static void write_double(char *at, double value)
{
    union { double value; uint64_t bits; } number = {.value = value};
    write_number(at, number.bits);
}

/* Write the values of an answer into its header, but for the versions of its parts. */
static void fill_in(const Answers *self, const Pushed *push, PyObject *said, const Py_ssize_t *at,
                    long long current, char *to)
{
    write_number(to + at[0], (uint64_t)push->number[0]);
    write_number(to + at[1], (uint64_t)push->version);
    write_number(to + at[2], (uint64_t)current);
    write_number(to + at[3], (uint64_t)push->staleness);
    write_double(to + at[4], (double)push->staleness);
    if (self->has_statistic) {
        write_double(to + at[5], PyFloat_AsDouble(PyTuple_GetItem(said, 4)));
        memcpy(to + at[6], PyBytes_AsString(PyTuple_GetItem(said, 5)), (size_t)self->vbars_width);
    }
}

/* Send an answer, or as much of it as the socket takes; return a copy of the rest, or True. What
 * fails is sent again by the transport, which finds out why. */
static PyObject *sent(int fd, struct iovec *pieces, int count, Py_ssize_t size)
{
    struct msghdr message = {.msg_iov = pieces, .msg_iovlen = (size_t)count};
    Py_ssize_t done = fd < 0 ? 0 : sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    done = done < 0 ? 0 : done;
    if (done == size)
        return Py_NewRef(Py_True);
    PyObject *rest = PyBytes_FromStringAndSize(NULL, size - done);
    char *to = rest == NULL ? NULL : PyBytes_AsString(rest);
    for (int index = 0; to != NULL && index < count; index++) {
        size_t length = pieces[index].iov_len;
        size_t skipped = (size_t)done < length ? (size_t)done : length;
        memcpy(to, (char *)pieces[index].iov_base + skipped, length - skipped);
        to += length - skipped;
        done -= (Py_ssize_t)skipped;
    }
    return rest;
}

/* Take a view of the current parameters; -1: an error is set. */
static int take_parameters(const Answers *self, Py_buffer *view)
{
    PyObject *current = get(self->part[PART_store], Store_current);
    if (!is_of(current, Version_class) || !is_of(get(current, Version_room), Arena_class)) {
        PyErr_SetString(PyExc_TypeError, "the store has no current version");
        return -1;
    }
    return PyObject_GetBuffer(get(get(current, Version_room), Arena_data), view, PyBUF_SIMPLE);
}

int copy_parameters(const Answers *self, char *to)
{
    Py_buffer payload;
    if (take_parameters(self, &payload) < 0)
        return -1;
    int whole = payload.len == self->nbytes;
    if (whole)
        memcpy(to, payload.buf, (size_t)payload.len);
    else
        PyErr_SetString(PyExc_ValueError, "the model has another length");
    PyBuffer_Release(&payload);
    return whole ? 0 : -1;
}

/* Return the answer, the template with its values, and the parameters: what of it is not sent. */
static PyObject *packed(const Answers *self, const Pushed *push, PyObject *said)
{
    Py_ssize_t size = self->answer.len;
    Py_buffer payload;
    if (take_parameters(self, &payload) < 0)
        return NULL;
    PyObject *made = NULL;
    char *header = self->header;
    if (payload.len != self->nbytes)
        PyErr_SetString(PyExc_ValueError, "the model has another length");
    else {
        memcpy(header, self->answer.buf, (size_t)size);
        fill_in(self, push, said, self->answer_at, push->version, header);
        write_number(header + self->answer_at[self->answer_count - 1], (uint64_t)push->level + 1);
        if (self->header_at != NULL) {
            memcpy(self->header_at, header, (size_t)size);
            if (self->payload_at != NULL)
                memcpy(self->payload_at, payload.buf, (size_t)payload.len);
            made = Py_NewRef(Py_True);
        } else {
            struct iovec pieces[] = {{header, (size_t)size}, {payload.buf, (size_t)payload.len}};
            made = sent(self->fd, pieces, 2, size + self->nbytes);
        }
    }
    PyBuffer_Release(&payload);
    return made;
}

/* Count a push and its answer, as `Connection.answered` does. `size`, `overhead`, `payload`: of the
 * answer. */
static int count(Answers *self, PyObject *received, PyObject *size, PyObject *overhead,
                 PyObject *payload)
{
    PyObject *wire = self->part[PART_wire], *row[2], **number = self->number_of;
    if (!has_accounts(self, row)) {
        PyErr_SetString(PyExc_TypeError, "the accounts of a connection were replaced");
        return -1;
    }
    PyObject *traffic = get(wire, Connection_traffic), *in = row[0], *out = row[1];
    PyObject *rest = get(wire, Connection__rest);
    return -(put(wire, Connection__begin, Py_NewRef(rest)) < 0 ||
             put(wire, Connection__end, Py_NewRef(rest)) < 0 ||
             add(traffic, Traffic_bytes_in, received) < 0 ||
             add(traffic, Traffic_messages_in, self->one) < 0 ||
             add(in, KindTraffic_messages, self->one) < 0 ||
             add(in, KindTraffic_overhead, number[PUSH_OVERHEAD]) < 0 ||
             add(in, KindTraffic_payload, number[PUSH_PAYLOAD]) < 0 ||
             add(traffic, Traffic_bytes_out, size) < 0 ||
             add(traffic, Traffic_messages_out, self->one) < 0 ||
             add(out, KindTraffic_messages, self->one) < 0 ||
             add(out, KindTraffic_overhead, overhead) < 0 ||
             add(out, KindTraffic_payload, payload) < 0);
}

/* Count the parts of a coded answer: `Ledger.brought`. */
static int count_parts(const Answers *self, const Form *form)
{
    PyObject *brought = get(get(self->part[PART_member], Member_ledger), Ledger__brought);
    PyObject *known = PyDict_Check(brought) ? PyDict_GetItemWithError(brought, form->parts) : NULL;
    if (known == NULL && PyErr_Occurred())
        return -1;
    PyObject *sum = known == NULL ? Py_NewRef(self->one) : PyNumber_Add(known, self->one);
    int done = sum == NULL ? -1 : PyObject_SetItem(brought, form->parts, sum);
    Py_XDECREF(sum);
    return done;
}

/* Write a coded answer whose form is known; return what of it is not sent. */
static PyObject *filled(Answers *self, const Pushed *push, PyObject *said, const Form *form,
                        PyObject *regions)
{
    PyObject *current = get(self->part[PART_replica], SnapshotPool_current), *made = NULL;
    struct iovec pieces[1 + 2 * MOST_PIECES];
    long long number, age;
    Py_buffer replica;
    if (!is_of(current, Version_class) || !is_of(get(current, Version_room), Arena_class) ||
        !read_integer(get(current, Version_number), &number) ||
        !read_integer(get(current, Version_level), &age)) {
        PyErr_SetString(PyExc_TypeError, "the replica has no usual version");
        return NULL;
    }
    PyObject *data = get(get(current, Version_room), Arena_data);
    Py_ssize_t head = PyBytes_Size(form->header);
    PyObject *header = PyBytes_FromStringAndSize(PyBytes_AsString(form->header), head);
    if (header == NULL || PyObject_GetBuffer(data, &replica, PyBUF_SIMPLE) < 0) {
        Py_XDECREF(header);
        return NULL;
    }
    char *begin = PyBytes_AsString(header);
    fill_in(self, push, said, form->at, number, begin);
    for (Py_ssize_t index = 0; index < form->age_count; index++)
        write_number(begin + form->ages[index], (uint64_t)age);
    pieces[0] = (struct iovec){begin, (size_t)head};
    if (find_payloads(form, regions, &replica, pieces + 1))
        made = sent(self->fd, pieces, 1 + 2 * (int)form->segment_count, form->size);
    else
        PyErr_SetString(PyExc_ValueError, "an increment has another length");
    PyBuffer_Release(&replica);
    Py_DECREF(header);
    return made;
}

/* Return a coded answer, or what of it is not sent: `CodedAnswers.answer`, which makes those whose
 * form is not known. */
static PyObject *coded(Answers *self, const Pushed *push, PyObject *said, PyObject *received)
{
    PyObject *regions = PyObject_CallFunction(self->part[PART_regions], "L", push->number[2]);
    if (regions == NULL)
        return NULL;
    PyObject *current = get(self->part[PART_replica], SnapshotPool_current), *made = NULL;
    const Form *form = PyTuple_Check(regions)
                           ? form_of(self->part[PART_increments], PyTuple_Size(regions))
                           : NULL;
    if (form == NULL || !is_of(current, Version_class) ||
        get(current, Version_level) == Py_None)
        made = PyObject_CallFunction(self->part[PART_answer_coded], "OLLO", received,
                                     push->number[0], push->number[2], said);
    else if (count(self, received, form->whole, form->overhead, form->payload) == 0 &&
             count_parts(self, form) == 0) {
        self->size = form->size;
        made = filled(self, push, said, form, regions);
    }
    Py_DECREF(regions);
    return made;
}

PyObject *answered(Answers *self, const Pushed *push, PyObject *said, PyObject *received)
{
    PyObject **number = self->number_of;
    self->answered++;
    if (is_coded(self))
        return coded(self, push, said, received);
    if (count(self, received, number[ANSWER_SIZE], number[ANSWER_OVERHEAD], number[PAYLOAD]) < 0)
        return NULL;
    self->size = self->answer.len + self->nbytes;
    return packed(self, push, said);
}
