/* Stores the row of an exchange into the memory of a journal's segment, or writes a long one, at
 * once, and tells whether an answer may leave: `KeptState.exchanged`, `JournalWriter.exchange`,
 * `FixedFrames.store` and `Recorder.hold`.
 *
 * Only the usual row is taken here: there is room for it in the segment, which lends memory for a
 * short one that is known to be writable. Where a condition does not hold nothing is stored, and
 * `KeptState.exchanged` does the whole of it: it begins the next segment, or has a thread write.
 */

#include "answers.h"
#include <sys/uio.h>

#define STEADY 7 /* aiops.state.row_kinds.RowKind */
#define CODED 20
#define FOLLOWED 4 /* aiops.durable.rows.FOLLOWED */
#define FRAME 48 /* aiops.state.frames: bytes of a frame's head, of `END`, and what is not known */
#define END 8
#define UNKNOWN 0xFFFFFFFFLL
#define ROW 40 /* aiops.state.row_kinds.STEADY_ROW: the parts of a coded gradient follow */
#define CHECK 4 /* what CODED_ROW has more */
#define SHORT (64 << 10) /* aiops.net.mapped_file.SHORT: memory is lent for no longer payload */

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

/* Where the row of an exchange is to lie in a segment, and what its frame says. */
typedef struct {
    long long at, end, half, size, salt, synced, number, peer;
    Py_ssize_t fields, rest; /* bytes of the struct, and of parts */
    int kind, flags;
    uint32_t check, followed; /* of the update's sums, and of the replica's step */
} Row;

static inline Py_ssize_t padded(Py_ssize_t nbytes)
{
    return nbytes + (-nbytes & 7);
}

static inline size_t head_of(const Row *row)
{
    return FRAME + (size_t)padded(row->fields + row->rest);
}

static inline size_t tail_of(const Answers *self)
{
    return (size_t)(-self->region & 7) + END;
}

/* Make all of a frame before its payload, of which `crc` is, as `FixedFrames.store` does. */
static void make_head(const Answers *self, const Pushed *push, const Row *row, uint32_t crc,
                      char *frame)
{
    char salted[4], *fields = frame + FRAME, *to = put_number(fields, (uint64_t)row->peer, 4);
    long long unsynced = row->number - row->synced;
    size_t length = (size_t)(row->fields + row->rest);
    for (int index = 0; index < PUSHED; index++)
        to = put_number(to, (uint64_t)push->number[index], 8);
    to = put_number(to, row->check, 4);
    if (row->kind == CODED)
        to = put_number(to, row->followed, 4);
    memcpy(to, PyBytes_AsString(PyTuple_GetItem(self->part[PART_recorded], 1)), (size_t)row->rest);
    memset(to + row->rest, 0, -length & 7);
    to = put_number(frame + 4, length, 4);
    to = put_number(to, (uint64_t)self->region, 8);
    to = put_number(to, (uint64_t)row->number, 8);
    to = put_double(to, push->now);
    to = put_number(to, crc_of(0, fields, length), 4);
    to = put_number(to, crc, 4);
    to = put_number(to, (uint64_t)(unsynced < UNKNOWN ? unsynced : UNKNOWN), 4);
    *to++ = (char)row->kind;
    *to++ = (char)row->flags;
    put_number(to, 0, 2);
    put_number(salted, (uint64_t)row->salt, 4);
    put_number(frame, crc_of(crc_of(0, salted, 4), frame + 4, FRAME - 4), 4);
}

static int same_bytes(PyObject *one, PyObject *other)
{
    int same = one == other || PyObject_RichCompareBool(one, other, Py_EQ);
    if (same < 0)
        PyErr_Clear();
    return same > 0;
}

/* Find where a row is to lie, and what is known of it; return whether the segment has room. */
static int find_row(const Answers *self, PyObject *kept, PyObject *writer, Row *row)
{
    PyObject *frames = get(writer, JournalWriter__frames);
    PyObject *parts = PyTuple_GetItem(self->part[PART_recorded], 1);
    long long payload, kind;
    if (!is_of(frames, FixedFrames_class) ||
        !read_integer(get(frames, FixedFrames_kind), &kind) || kind != row->kind ||
        !read_integer(get(frames, FixedFrames_payload), &payload) || payload != self->region ||
        !same_bytes(get(frames, FixedFrames_rest), parts) ||
        !read_place(writer, JournalWriter__at, &row->at) ||
        !read_place(writer, JournalWriter__half, &row->half) ||
        !read_place(writer, JournalWriter__size, &row->size) ||
        !read_place(writer, JournalWriter__salt, &row->salt) || row->salt > UNKNOWN ||
        !read_place(writer, JournalWriter__synced, &row->synced) ||
        !read_integer(get(get(kept, KeptState_recorder), Recorder_next), &row->number) ||
        row->number <= row->synced || !read_integer(self->peer, &row->peer) || row->peer < 0 ||
        row->peer > UNKNOWN)
        return 0;
    row->rest = PyBytes_Size(parts);
    row->end = row->at + (long long)head_of(row) + padded(self->region);
    return row->end + END <= row->size;
}

/* Return whether memory is lent for a row. */
static int is_lent(PyObject *writer, double time, const Row *row)
{
    long long lent_to;
    double until = PyFloat_AsDouble(get(writer, JournalWriter__lent_until));
    PyErr_Clear();
    return read_place(writer, JournalWriter__lent_to, &lent_to) && row->end + END <= lent_to &&
           time < until;
}

/* Have memory be lent: `JournalWriter.borrow`. 1; 0: there is none; -1: an error is set. */
static int borrow(const Answers *self, PyObject *writer, PyObject *now)
{
    PyObject *found = PyObject_CallMethodObjArgs(writer, names[NAME_borrow], now,
                                                 self->part[PART_recorded], NULL);
    int has = found == NULL ? -1 : is_true(found);
    Py_XDECREF(found);
    return has;
}

/* Store a frame in memory that is lent; 0: it is not. */
static int store_frame(const Answers *self, const Pushed *push, PyObject *writer, const Row *row)
{
    Py_buffer memory;
    if (PyObject_GetBuffer(get(writer, JournalWriter__memory), &memory, PyBUF_WRITABLE) < 0)
        return (PyErr_Clear(), 0);
    int done = row->end + END <= memory.len;
    if (done) {
        char *frame = (char *)memory.buf + row->at, *payload = frame + head_of(row);
        size_t region = (size_t)self->region;
        make_head(self, push, row, copy_with_crc(payload, push->region, region), frame);
        memset(payload + region, 0, tail_of(self));
    }
    PyBuffer_Release(&memory);
    return done;
}

/* Write a frame by a call of the system, for which memory is not lent: its payload from where it has
 * come. 0: it is not written, or not all of it, and Python is to do it, which finds out why. */
static int write_frame(const Answers *self, const Pushed *push, PyObject *writer, const Row *row)
{
    long long descriptor, size = row->end - row->at + END, written = -1;
    size_t head = head_of(row), region = (size_t)self->region, tail = tail_of(self);
    Py_buffer room;
    if (!read_place(writer, JournalWriter__descriptor, &descriptor) || descriptor > INT32_MAX ||
        PyObject_GetBuffer(get(writer, JournalWriter__room), &room, PyBUF_WRITABLE) < 0)
        return (PyErr_Clear(), 0);
    if ((Py_ssize_t)(head + tail) <= room.len) {
        char *frame = room.buf;
        struct iovec pieces[] = {
            {frame, head}, {(char *)push->region, region}, {frame + head, tail}};
        make_head(self, push, row, crc_of(0, push->region, region), frame);
        memset(frame + head, 0, tail);
        Py_BEGIN_ALLOW_THREADS
        written = pwritev((int)descriptor, pieces, 3, (off_t)row->at);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&room);
    return written == size;
}

/* Store or write the row of an exchange. 1; 0: that is not done, and Python is to do it; -1: an
 * error is set. `row` has what is said of the update. */
static int store_row(const Answers *self, const Pushed *push, PyObject *now, PyObject *kept, Row row)
{
    PyObject *writer = writer_of(kept);
    if (writer == NULL || !find_row(self, kept, writer, &row))
        return 0;
    int done;
    if (self->region > SHORT)
        done = write_frame(self, push, writer, &row);
    else {
        done = is_lent(writer, push->now, &row) ? 1 : borrow(self, writer, now);
        if (done > 0)
            done = writer_of(kept) == writer && find_row(self, kept, writer, &row) &&
                   is_lent(writer, push->now, &row) && store_frame(self, push, writer, &row);
    }
    if (done <= 0)
        return done;
    PyObject *bytes = PyLong_FromLongLong(row.end - row.at);
    done = bytes == NULL || add(writer, JournalWriter_nbytes, bytes) < 0 ||
                   put(writer, JournalWriter__at, PyLong_FromLongLong(row.end)) < 0 ||
                   put(writer, JournalWriter__written, PyLong_FromLongLong(row.number)) < 0 ||
                   put(get(kept, KeptState_recorder), Recorder_next,
                       PyLong_FromLongLong(row.number + 1)) < 0
               ? -1
               : 1;
    Py_XDECREF(bytes);
    if (done > 0 && row.end > row.half) {
        bytes = PyObject_CallMethodObjArgs(writer, names[NAME_pass_half], now, NULL);
        done = bytes == NULL ? -1 : 1;
        Py_XDECREF(bytes);
    }
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

/* Find the checksum that a row has of a result: `aiops.durable.rows.check_of`. */
static int find_check(long long ticket, PyObject *sums, uint32_t *check)
{
    Py_buffer view;
    if (PyObject_GetBuffer(sums, &view, PyBUF_SIMPLE) < 0)
        return -1;
    *check = crc_of((uint32_t)ticket, view.buf, (size_t)view.len);
    PyBuffer_Release(&view);
    return 0;
}

/* Find what the row of an exchange says: `aiops.durable.rows.exchange_fields`. -1: an error is set. */
static int describe(const Answers *self, const Outcome *outcome, Row *row)
{
    long long ticket;
    if (!read_integer(outcome->ticket, &ticket)) {
        PyErr_SetString(PyExc_TypeError, "an update's number is an integer");
        return -1;
    }
    int coded = is_coded(self), followed = outcome->followed != Py_None;
    row->kind = coded ? CODED : STEADY;
    row->fields = ROW + (coded ? CHECK : 0);
    row->flags = outcome->leased | (followed ? FOLLOWED : 0); /* aiops.durable.rows.LEASED is 1 */
    if (followed && find_check(ticket + 1, outcome->followed, &row->followed) < 0)
        return -1;
    if (outcome->sums != Py_None)
        return find_check(ticket, outcome->sums, &row->check);
    row->check = crc_of((uint32_t)ticket, self->sums, 8 * (size_t)self->tensors);
    return 0;
}

int record_it(const Answers *self, const Pushed *push, PyObject *now, PyObject *record,
              const Outcome *outcome)
{
    const long long *number = push->number;
    if (is_of(record, KeptState_class)) {
        Row row = {0};
        int done = describe(self, outcome, &row);
        if (done == 0)
            done = store_row(self, push, now, record, row);
        if (done != 0)
            return done < 0 ? -1 : 0;
    }
    PyObject *numbers = Py_BuildValue("LLLL", number[0], number[1], number[2], number[3]);
    PyObject *sums = outcome->sums == Py_None ? sums_of(self) : Py_NewRef(outcome->sums);
    PyObject *found =
        numbers == NULL || sums == NULL
            ? NULL
            : PyObject_CallMethod(record, "exchanged", "OOOOOOOO", now,
                                  outcome->leased ? Py_True : Py_False, self->peer, numbers,
                                  self->part[PART_recorded], outcome->ticket, sums,
                                  outcome->followed);
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
