/* The server's half of the steady exchange: from the bytes of a push to those of its answer.
 *
 * `aiops/engine/steady.py` is the specification (`Steady.general`, `Shortcut.update`), with the parts
 * of `UpdateQueue.at_once`, `Store.update` and `Connection.match` that it needs. Here only the usual
 * case is decided, where all conditions hold. Until they are known to hold nothing is changed, and
 * whenever one does not, the specification does the whole of it, from the same bytes. So a condition
 * here may be narrower than Python's, and never wider. Bounds:
 *   lengths   are fixed when an `Answers` is made; no byte of a peer's is ever a length.
 *   integers  are read from slots of at most 8 bytes, and compared with LARGEST.
 *   memory    an object is used as one of a class of fields.h after `is_of` only.
 */

#include "answers.h"

/* Compare received bytes with the form of a push, as `Connection.match` does. Return 1 if they
 * complete one, 0 if they begin it, -1 if neither: the specification is to look at them. */
static int match(const Answers *self, Py_ssize_t nbytes, long long *first, long long *end)
{
    PyObject *wire = self->part[PART_wire], *state = get(wire, Connection_state);
    long long rest, whole;
    if (get(wire, Connection_expected) != self->part[PART_template] ||
        get(wire, Connection__message) != Py_None ||
        !read_integer(get(wire, Connection__begin), first) ||
        !read_integer(get(wire, Connection__end), end) ||
        !read_integer(get(wire, Connection__rest), &rest) ||
        !read_integer(get(wire, Connection__whole), &whole))
        return -1;
    *end += nbytes;
    if (*first != rest || *first < 0 || whole != self->form.len + self->region ||
        whole > self->head.len - *first || *end < *first + self->form.len ||
        *end > *first + whole || !PyUnicode_Check(state) ||
        PyUnicode_CompareWithASCIIString(state, "open") != 0)
        return -1;
    const unsigned char *head = (const unsigned char *)self->head.buf + *first;
    const unsigned char *form = self->form.buf, *varies = self->varies.buf;
    int differs = 0;
    for (Py_ssize_t at = 0; at < self->form.len; at++)
        differs |= (head[at] ^ form[at]) & ~varies[at];
    return differs ? -1 : *end == *first + whole;
}

/* Return whether a push's numbers are those of one that is answered at once; read them. */
static int has_numbers(const Answers *self, const unsigned char *head, Pushed *push)
{
    PyObject *member = self->part[PART_member], *store = self->part[PART_store];
    PyObject *current = get(store, Store_current);
    long long last;
    for (int index = 0; index < PUSHED; index++) {
        const PushSlot *slot = &self->pushed[index];
        uint64_t bits = read_number(head + slot->begin, slot->width);
        if (slot->sign && slot->width < 8 && bits >> (8 * slot->width - 1))
            bits -= 1ULL << (8 * slot->width);
        if (!slot->sign && bits > LARGEST)
            return 0;
        push->number[index] = (long long)bits;
    }
    if (!is_of(current, Version_class) || !is_of(member, Member_class) ||
        !read_integer(get(current, Version_level), &push->level) ||
        !read_integer(get(current, Version_number), &push->version) ||
        !read_integer(get(member, Member_last_seq), &last))
        return 0;
    push->version++;
    const PushSlot *age = &self->pushed[PUSHED - 1];
    for (Py_ssize_t index = 0; index < self->age_count; index++)
        if (memcmp(head + self->ages[index], head + age->begin, (size_t)age->width) != 0)
            return 0; /* its tensors are of several versions */
    long long id = push->number[0], seq = push->number[1], have = push->number[2];
    long long base = push->number[3];
    if (base < 0 || base > push->level)
        return 0;
    push->staleness = push->level - base;
    return PyObject_RichCompareBool(get(member, Member_peer), self->peer, Py_EQ) == 1 &&
           is_true(get(member, Member_excused)) == 0 && is_true(get(member, Member_covers)) == 0 &&
           last < seq && seq <= LARGEST && 0 <= id && id <= LARGEST && -1 <= have &&
           have <= LARGEST && have != push->version;
}

/* Return whether nothing is outstanding, queued, held or due, and no answer waits. */
static int is_idle(const Answers *self)
{
    PyObject *updates = self->part[PART_updates], *warnings = self->part[PART_warnings];
    PyObject *values[] = {
        get(self->part[PART_maker], UpdateMaker_job), get(updates, UpdateQueue__on_applied),
        get(updates, UpdateQueue__queue), get(self->part[PART_held], HeldPushes_pushes),
        get(self->part[PART_collected], CollectedSum_count), get(warnings, RunWarnings_due),
        get(self->part[PART_closure], PushClosure_why),
    };
    for (size_t index = 0; index < sizeof values / sizeof *values; index++)
        if (is_true(values[index]) != 0)
            return 0;
    return !is_coded(self) || is_true(get(self->part[PART_delta], DeltaReplies_waiting)) == 0;
}

int has_accounts(const Answers *self, PyObject *row[2])
{
    PyObject *traffic = get(self->part[PART_wire], Connection_traffic);
    if (!is_of(traffic, Traffic_class))
        return 0;
    for (int index = 0; index < 2; index++) {
        PyObject *found = get(traffic, index ? Traffic_kinds_out : Traffic_kinds_in);
        if (!PyDict_Check(found))
            return 0;
        row[index] = PyDict_GetItemWithError(found, names[index ? NAME_ack : NAME_push]);
        if (row[index] == NULL || !is_of(row[index], KindTraffic_class))
            return (PyErr_Clear(), 0);
    }
    return is_of(get(self->part[PART_member], Member_ledger), Ledger_class);
}

/* Return whether the policy would apply a gradient at once; -1 with an error set. */
static int applies(const Answers *self, const Pushed *push)
{
    PyObject *policy = self->part[PART_policy];
    if (policy == Py_None)
        return 1;
    PyObject *number = PyObject_GetAttr(self->part[PART_member], names[NAME_number]);
    PyObject *decision = number == NULL
                             ? NULL
                             : PyObject_CallFunction(policy, "OL", number, push->staleness);
    int same = decision == NULL ? -1
                                : PyObject_RichCompareBool(decision, self->part[PART_apply], Py_EQ);
    Py_XDECREF(number);
    Py_XDECREF(decision);
    return same;
}

/* Find learning rates and scalars, as `UpdateMaker.whole` does. 1: new references; -1: an error. */
static int find_rates(const Answers *self, const Pushed *push, PyObject *now, PyObject **steps,
                      PyObject **scalars)
{
    PyObject *found = NULL;
    if (!self->scheduled && !self->scalar_count) {
        PyObject *key = PyLong_FromLongLong(push->staleness);
        PyObject *row = key == NULL
                            ? NULL
                            : PyDict_GetItemWithError(self->part[PART_even], key);
        Py_XDECREF(key);
        if (row != NULL && PyTuple_Check(row) && PyTuple_Size(row) == 2) {
            *steps = Py_NewRef(PyTuple_GetItem(row, 1));
            *scalars = Py_NewRef(Py_None);
            return 1;
        }
        if (PyErr_Occurred())
            return -1;
    }
    found = PyObject_CallMethod(self->part[PART_maker], "whole", "LO", push->staleness, now);
    if (found == NULL || !PyTuple_Check(found) || PyTuple_Size(found) != 2) {
        Py_XDECREF(found);
        return PyErr_Occurred() ? -1 : 0;
    }
    *steps = Py_NewRef(PyTuple_GetItem(found, 0));
    *scalars = Py_NewRef(PyTuple_GetItem(found, 1));
    Py_DECREF(found);
    return 1;
}

/* Return whether all of an array's rows of float64 are within the ends of their columns, which are
 * given as pairs; `ends` NULL: within 0 and `most`. What cannot be told is not. */
static int is_within(PyObject *array, PyObject *ends, double most)
{
    Py_buffer view;
    Py_ssize_t columns = ends == NULL ? 1 : PyList_Check(ends) ? PyList_Size(ends) : 0;
    if (columns <= 0 || columns > SCALARS || PyObject_GetBuffer(array, &view, PyBUF_SIMPLE) < 0)
        return (PyErr_Clear(), 0);
    double low[SCALARS] = {0.0}, high[SCALARS] = {most};
    int within = view.len % (Py_ssize_t)(columns * sizeof(double)) == 0;
    for (Py_ssize_t column = 0; ends != NULL && column < columns; column++) {
        PyObject *pair = PyList_GetItem(ends, column);
        within = within && pair != NULL && PyTuple_Check(pair) &&
                 PyArg_ParseTuple(pair, "dd", &low[column], &high[column]);
    }
    for (Py_ssize_t at = 0, column = 0; within && at < view.len; at += sizeof(double)) {
        double value;
        memcpy(&value, (char *)view.buf + at, sizeof value);
        within = low[column] <= value && value <= high[column];
        column = column + 1 == columns ? 0 : column + 1;
    }
    PyBuffer_Release(&view);
    PyErr_Clear();
    return within;
}

/* Return whether an update is proven to be finite, and count it: `FiniteGuard.covers`. */
static int is_covered(const Answers *self, double largest, PyObject *steps, PyObject *scalars)
{
    PyObject *guard = self->part[PART_guard], *seen = get(guard, FiniteGuard__seen), *key, *known;
    long long left;
    int narrow = is_true(get(guard, FiniteGuard_narrow));
    double magnitude = PyFloat_AsDouble(get(guard, FiniteGuard_magnitude));
    double most = PyFloat_AsDouble(get(guard, FiniteGuard__step));
    if (!read_integer(get(guard, FiniteGuard__left), &left) || left <= 0 ||
        narrow < 0 || !((largest = narrow ? largest : LIMIT) <= magnitude) || !PyDict_Check(seen))
        return (PyErr_Clear(), 0);
    if ((key = PyLong_FromVoidPtr(steps)) == NULL)
        return -1;
    known = PyDict_GetItemWithError(seen, key); /* rates are arrays that come again, or change */
    Py_DECREF(key);
    if ((known == steps || is_within(steps, NULL, most)) &&
        (get(guard, FiniteGuard__seen_scalars) == scalars || scalars == Py_None ||
         is_within(scalars, get(guard, FiniteGuard__scalars), 0.0))) {
        if (put(guard, FiniteGuard__seen_scalars, Py_NewRef(scalars)) < 0)
            return -1;
        return put(guard, FiniteGuard__left, PyLong_FromLongLong(left - 1)) < 0 ? -1 : 1;
    }
    PyErr_Clear();
    PyObject *found = PyObject_CallMethod(guard, "covers", "OOd", steps, scalars, largest);
    int covered = found == NULL ? -1 : is_true(found);
    Py_XDECREF(found);
    return covered;
}

/* Find the gradient of a push, and its largest magnitude; return whether all of it is fit. What is
 * decoded is, and its magnitude matters to a proof that is for small ones only. */
static int find_gradient(const Answers *self, const char *payload, Pushed *push)
{
    push->data = push->region = payload;
    if (!self->piece_count)
        return survey(self, payload, &push->largest);
    push->data = self->decoded.buf;
    push->largest = LIMIT;
    if (!decode_all(self, payload))
        return 0;
    return is_true(get(self->part[PART_guard], FiniteGuard_narrow)) == 0 ||
           survey(self, push->data, &push->largest);
}

void bring_payload(Answers *self)
{
    if (self->payload_from != NULL)
        memcpy(self->payload_to, self->payload_from, (size_t)self->region);
    self->payload_from = NULL;
}

PyObject *exchange(Answers *self, PyObject *received, PyObject *now, PyObject *record,
                   PyObject *state)
{
    Pushed push;
    long long nbytes, first = 0, end = 0;
    PyObject *row[2], *steps = NULL, *scalars = NULL, *said, *answer = NULL;
    int whole = read_integer(received, &nbytes) && nbytes >= 0 && nbytes <= self->head.len
                    ? match(self, (Py_ssize_t)nbytes, &first, &end)
                    : -1;
    self->kept = 0;
    self->size = 0;
    if (whole == 0) {
        PyObject *wire = self->part[PART_wire], *traffic = get(wire, Connection_traffic);
        if (!is_of(traffic, Traffic_class))
            goto general;
        if (put(wire, Connection__end, PyLong_FromLongLong(end)) < 0 ||
            add(traffic, Traffic_bytes_in, received) < 0)
            return NULL;
        return PyBytes_FromStringAndSize(NULL, 0);
    }
    push.now = PyFloat_AsDouble(now);
    if (push.now == -1.0 && PyErr_Occurred())
        return NULL;
    const char *head = (const char *)self->head.buf + first;
    const char *payload = self->payload_from != NULL ? self->payload_from : head + self->form.len;
    if (whole < 0 || !has_numbers(self, (const unsigned char *)head, &push) || !has_accounts(self, row) ||
        !is_idle(self) || !find_gradient(self, payload, &push))
        goto general;
    int goes = applies(self, &push);
    if (goes > 0)
        goes = find_rates(self, &push, now, &steps, &scalars);
    if (goes > 0) /* last: if it holds, the update is counted and must be carried out */
        goes = is_covered(self, push.largest, steps, scalars);
    if (goes > 0) {
        said = carry_out(self, &push, now, record, steps, scalars);
        if (state != Py_None && !(self->kept = may_leave(state))) { /* it is packed, to be held */
            self->fd = -1;
            self->header_at = NULL;
        }
        self->id = push.number[0];
        if (said != NULL)
            answer = answered(self, &push, said, received);
        Py_XDECREF(said);
    }
    Py_XDECREF(steps);
    Py_XDECREF(scalars);
    if (goes != 0)
        return answer;
general:
    PyErr_Clear();
    bring_payload(self);
    return PyObject_CallFunctionObjArgs(self->part[PART_general], received, now, record, NULL);
}
