/* Stores the row of an exchange into the memory of a journal's segment, at once, and tells whether
 * an answer may leave: `KeptState.exchanged`, `JournalWriter.exchange`, `FixedFrames.store` and
 * `Recorder.hold`.
 *
 * Only the usual row is stored here, where the segment has lent memory for it that is known to be
 * writable. Where a condition does not hold nothing is changed, and `KeptState.exchanged` does the
 * whole of it: it borrows memory, begins the next segment, or has a thread write.
 */

#include "answers.h"

#define STEADY 7 /* aiops.state.row_kinds.RowKind */
#define FRAME 48 /* aiops.state.frames: bytes of a frame's head, of `END`, and what is not known */
#define END 8
#define UNKNOWN 0xFFFFFFFFLL
#define ROW 40 /* aiops.state.row_kinds.STEADY_ROW */

/* Little endian, as a journal's numbers are. */
static char *put_number(char *to, uint64_t number, int width)
{
    for (int byte = 0; byte < width; byte++, number >>= 8)
        *to++ = (char)number;
    return to;
}

static char *put_double(char *to, double value)
{
    union { double value; uint64_t bits; } number = {.value = value};
    return put_number(to, number.bits, 8);
}

static int read_place(PyObject *writer, int which, long long *found)
{
    return read_integer(get(writer, which), found) && *found >= 0;
}

/* Return the writer that takes rows at once; NULL: there is none. */
static PyObject *writer_of(PyObject *kept)
{
    PyObject *recorder = get(kept, KeptState_recorder), *journal = get(kept, KeptState_journal);
    if (!is_of(recorder, Recorder_class) || !is_of(journal, RunningJournal_class) ||
        is_true(get(recorder, Recorder_recording)) != 1 ||
        is_true(get(recorder, Recorder_pending)) != 0 ||
        get(journal, RunningJournal_appended) != Py_None)
        return NULL;
    PyObject *writer = get(journal, RunningJournal_writer);
    return is_of(writer, JournalWriter_class) && is_true(get(writer, JournalWriter_why)) == 0 &&
                   is_true(get(writer, JournalWriter__waiting)) == 0
               ? writer
               : NULL;
}

/* Write a frame, as `FixedFrames.store` does. */
static void write_frame(const Answers *self, const Pushed *push, char *frame, long long number,
                        long long peer, int leased, uint32_t check, uint32_t salt,
                        long long unsynced)
{
    char row[ROW], salted[4], *to = put_number(row, (uint64_t)peer, 4);
    for (int index = 0; index < PUSHED; index++)
        to = put_number(to, (uint64_t)push->number[index], 8);
    put_number(to, check, 4);
    uint32_t crc = crc_of(0, push->data, (size_t)self->nbytes);
    to = put_number(frame + 4, ROW, 4);
    to = put_number(to, (uint64_t)self->nbytes, 8);
    to = put_number(to, (uint64_t)number, 8);
    to = put_double(to, push->now);
    to = put_number(to, crc_of(0, row, ROW), 4);
    to = put_number(to, crc, 4);
    to = put_number(to, (uint64_t)(unsynced < UNKNOWN ? unsynced : UNKNOWN), 4);
    *to++ = STEADY;
    *to++ = (char)leased; /* aiops.durable.rows.LEASED */
    put_number(to, 0, 2);
    put_number(salted, salt, 4);
    put_number(frame, crc_of(crc_of(0, salted, 4), frame + 4, FRAME - 4), 4);
    memcpy(frame + FRAME, row, ROW);
    memcpy(frame + FRAME + ROW, push->data, (size_t)self->nbytes);
    memset(frame + FRAME + ROW + self->nbytes, 0, (size_t)(-self->nbytes & 7) + END);
}

/* Store the row of an exchange. 1; 0: nothing is changed, and Python is to do it; -1: an error is
 * set. `check` is of the update's sums. */
static int store_row(const Answers *self, const Pushed *push, PyObject *kept, int leased,
                     uint32_t check)
{
    PyObject *writer = writer_of(kept), *recorder = get(kept, KeptState_recorder);
    long long number, at, half, lent_to, salt, synced, peer, payload;
    if (writer == NULL || !is_of(get(writer, JournalWriter__frames), FixedFrames_class) ||
        !read_integer(get(get(writer, JournalWriter__frames), FixedFrames_payload), &payload) ||
        payload != self->nbytes || !read_place(writer, JournalWriter__at, &at) ||
        !read_place(writer, JournalWriter__half, &half) ||
        !read_place(writer, JournalWriter__lent_to, &lent_to) ||
        !read_place(writer, JournalWriter__salt, &salt) || salt > UNKNOWN ||
        !read_place(writer, JournalWriter__synced, &synced) ||
        !read_integer(get(recorder, Recorder_next), &number) || number <= synced ||
        !read_integer(self->peer, &peer) || peer < 0 || peer > UNKNOWN)
        return (PyErr_Clear(), 0);
    long long size = FRAME + ROW + self->nbytes + (-self->nbytes & 7), end = at + size;
    double until = PyFloat_AsDouble(get(writer, JournalWriter__lent_until));
    if (end + END > lent_to || end > half || !(push->now < until)) /* until then it is writable */
        return (PyErr_Clear(), 0);
    Py_buffer memory;
    if (PyObject_GetBuffer(get(writer, JournalWriter__memory), &memory, PyBUF_WRITABLE) < 0)
        return (PyErr_Clear(), 0);
    int done = end + END <= memory.len;
    if (done)
        write_frame(self, push, (char *)memory.buf + at, number, peer, leased, check,
                    (uint32_t)salt, number - synced);
    PyBuffer_Release(&memory);
    if (!done)
        return 0;
    PyObject *bytes = PyLong_FromLongLong(size);
    done = bytes == NULL || add(writer, JournalWriter_nbytes, bytes) < 0 ||
                   put(writer, JournalWriter__at, PyLong_FromLongLong(end)) < 0 ||
                   put(writer, JournalWriter__written, PyLong_FromLongLong(number)) < 0 ||
                   put(recorder, Recorder_next, PyLong_FromLongLong(number + 1)) < 0
               ? -1
               : 1;
    Py_XDECREF(bytes);
    return done;
}

int freeze(const Answers *self)
{
    PyObject *store = self->part[PART_store], *pool = self->part[PART_pool];
    PyObject *current = get(pool, SnapshotPool_current);
    int leased;
    if (is_true(get(store, Store__making)) == 0 && is_of(current, Version_class) &&
        is_true(get(pool, SnapshotPool_returned)) == 0) {
        leased = is_true(get(current, Version_readers));
        if (leased == 0)
            leased = is_true(get(current, Version_poisoned));
        return leased < 0 || put(store, Store__leased, PyBool_FromLong(leased)) < 0 ? -1 : leased;
    }
    PyErr_Clear();
    PyObject *found = PyObject_CallMethodObjArgs(store, names[NAME_freeze], NULL);
    leased = found == NULL ? -1 : is_true(found);
    Py_XDECREF(found);
    return leased;
}

/* Find the checksum that an update's row has: `aiops.durable.rows.check_of`. */
static int find_check(const Answers *self, PyObject *sums, uint32_t *check)
{
    long long ticket;
    Py_buffer view;
    if (!read_integer(get(self->part[PART_updates], UpdateQueue_tickets), &ticket)) {
        PyErr_SetString(PyExc_TypeError, "an update's number is an integer");
        return -1;
    }
    if (sums == Py_None) {
        *check = crc_of((uint32_t)ticket, self->sums, 8 * (size_t)self->tensors);
        return 0;
    }
    if (PyObject_GetBuffer(sums, &view, PyBUF_SIMPLE) < 0)
        return -1;
    *check = crc_of((uint32_t)ticket, view.buf, (size_t)view.len);
    PyBuffer_Release(&view);
    return 0;
}

int record_it(const Answers *self, const Pushed *push, PyObject *now, PyObject *record, int leased,
              PyObject *sums)
{
    const long long *number = push->number;
    if (is_of(record, KeptState_class)) {
        uint32_t check;
        int done = find_check(self, sums, &check);
        if (done == 0)
            done = store_row(self, push, record, leased, check);
        if (done != 0)
            return done < 0 ? -1 : 0;
    }
    PyObject *numbers = Py_BuildValue("LLLL", number[0], number[1], number[2], number[3]);
    sums = sums == Py_None ? sums_of(self) : Py_NewRef(sums);
    PyObject *found =
        numbers == NULL || sums == NULL
            ? NULL
            : PyObject_CallMethod(record, "exchanged", "OOOOOOO", now,
                                  leased ? Py_True : Py_False, self->peer, numbers,
                                  self->part[PART_gradient],
                                  get(self->part[PART_updates], UpdateQueue_tickets), sums);
    Py_XDECREF(numbers);
    Py_XDECREF(sums);
    Py_XDECREF(found);
    return found == NULL ? -1 : 0;
}

int may_leave(PyObject *kept)
{
    PyObject *recorder = get(kept, KeptState_recorder), *gate;
    long long next, later, level;
    if (!is_of(recorder, Recorder_class))
        return 0;
    gate = get(recorder, Recorder__gate);
    if (is_of(gate, CommitGate_class) && read_integer(get(gate, CommitGate_level), &level) &&
        level == 0) /* aiops.durable.commit_gate.Acks.APPLIED */
        return 1;
    return read_integer(get(recorder, Recorder_next), &next) &&
           read_integer(get(recorder, Recorder__later), &later) && later < next - 1;
}
