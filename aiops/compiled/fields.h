/* The fields of Python objects that compiled code reads and writes: one table.
 *
 * They stay attributes of Python's own classes, so there is one state and no copy. Each is in the
 * `__slots__` of its class, and so lies as one pointer at a fixed place in every instance.
 * `learn_fields` finds the places, once, by looking in an instance for a value that it has just set
 * there; a field that is not found so is an error, and then nothing is compiled.
 */

#ifndef AIOPS_FIELDS_H
#define AIOPS_FIELDS_H

#include "core.h"

#define CLASSES(X)                                                                                \
    X(Arena) X(BusyPoll) X(CollectedSum) X(CommitGate) X(Connection) X(DeltaReplies)              \
    X(EffectRunner) X(EventDispatcher) X(FiniteGuard) X(FixedFrames) X(HeldPushes) X(JournalWriter) X(KeptState)  \
    X(KindTraffic) X(Ledger) X(Member) X(MessageTransport) X(Pace) X(Params) X(Persistence)       \
    X(PushClosure) X(Receipt) X(RecentStaleness) X(Recorder) X(RunState) X(RunWarnings)           \
    X(RunningJournal) X(SnapshotPool) X(StalenessHistogram) X(SteadyExchange) X(Store) X(Traffic) \
    X(UpdateMaker) X(UpdateQueue) X(Version)

#define FIELDS(X)                                                                                 \
    X(Arena, data) X(Arena, sections)                                                             \
    X(BusyPoll, idle) X(BusyPoll, received)                                                       \
    X(CollectedSum, count)                                                                        \
    X(CommitGate, level)                                                                          \
    X(Connection, _begin) X(Connection, _end) X(Connection, _rest) X(Connection, _whole)          \
    X(Connection, _message) X(Connection, expected) X(Connection, missing) X(Connection, state)   \
    X(Connection, traffic)                                                                        \
    X(DeltaReplies, waiting)                                                                      \
    X(EffectRunner, at_once)                                                                      \
    X(EventDispatcher, _handling) X(EventDispatcher, broken)                                      \
    X(FiniteGuard, _left) X(FiniteGuard, _seen) X(FiniteGuard, _seen_scalars)                     \
    X(FiniteGuard, _scalars) X(FiniteGuard, _step)                                                \
    X(FiniteGuard, magnitude) X(FiniteGuard, narrow)                                              \
    X(FixedFrames, kind) X(FixedFrames, payload) X(FixedFrames, rest)                             \
    X(HeldPushes, pushes)                                                                         \
    X(JournalWriter, _at) X(JournalWriter, _descriptor) X(JournalWriter, _frames)                 \
    X(JournalWriter, _half) X(JournalWriter, _lent_to) X(JournalWriter, _lent_until)              \
    X(JournalWriter, _memory) X(JournalWriter, _room) X(JournalWriter, _salt)                     \
    X(JournalWriter, _size) X(JournalWriter, _synced) X(JournalWriter, _waiting)                  \
    X(JournalWriter, _written) X(JournalWriter, nbytes) X(JournalWriter, why)                     \
    X(KeptState, journal) X(KeptState, record) X(KeptState, recorder)                             \
    X(KindTraffic, messages) X(KindTraffic, overhead) X(KindTraffic, payload)                     \
    X(Ledger, _alike) X(Ledger, _batches) X(Ledger, _brought) X(Ledger, _exchanges)               \
    X(Ledger, _last) X(Ledger, _settled)                                                          \
    X(Member, answered) X(Member, answers) X(Member, covers) X(Member, excused)                   \
    X(Member, last_seq) X(Member, ledger) X(Member, peer) X(Member, pushes) X(Member, staleness)  \
    X(MessageTransport, _closing) X(MessageTransport, _full) X(MessageTransport, _out)            \
    X(MessageTransport, _received) X(MessageTransport, _unread) X(MessageTransport, pumped)       \
    X(MessageTransport, shortcut) X(MessageTransport, transport) X(MessageTransport, wire)        \
    X(Pace, due)                                                                                  \
    X(Params, age) X(Params, arena) X(Params, connection) X(Params, layout) X(Params, level)      \
    X(Persistence, exchanges)                                                                     \
    X(PushClosure, why)                                                                           \
    X(Receipt, mean_staleness) X(Receipt, pushed) X(Receipt, staleness) X(Receipt, used)          \
    X(Receipt, vbar) X(Receipt, vbars) X(Receipt, version) X(Receipt, why)                        \
    X(RecentStaleness, _count) X(RecentStaleness, mean)                                           \
    X(Recorder, _gate) X(Recorder, _later) X(Recorder, next) X(Recorder, pending)                 \
    X(Recorder, recording)                                                                        \
    X(RunState, kept)                                                                             \
    X(RunWarnings, due) X(RunWarnings, total)                                                     \
    X(RunningJournal, appended) X(RunningJournal, writer)                                         \
    X(SnapshotPool, _until) X(SnapshotPool, current) X(SnapshotPool, returned)                    \
    X(StalenessHistogram, bins) X(StalenessHistogram, total)                                      \
    X(SteadyExchange, _age) X(SteadyExchange, _connection) X(SteadyExchange, _gradients)          \
    X(SteadyExchange, _has_vbar) X(SteadyExchange, _have) X(SteadyExchange, _id)                  \
    X(SteadyExchange, _layout) X(SteadyExchange, _params) X(SteadyExchange, _seq)                 \
    X(SteadyExchange, _usual) X(SteadyExchange, direct) X(SteadyExchange, unsettled)              \
    X(Store, _leased) X(Store, _making) X(Store, busy) X(Store, current) X(Store, sums)           \
    X(Store, total)                                                                               \
    X(Traffic, bytes_in) X(Traffic, bytes_out) X(Traffic, kinds_in) X(Traffic, kinds_out)         \
    X(Traffic, messages_in) X(Traffic, messages_out)                                              \
    X(UpdateMaker, job)                                                                           \
    X(UpdateQueue, _on_applied) X(UpdateQueue, _queue) X(UpdateQueue, tickets)                    \
    X(Version, _changed) X(Version, _each) X(Version, _parts) X(Version, level)                   \
    X(Version, number) X(Version, poisoned) X(Version, readers) X(Version, room)

#define NAMED(class) class##_class,
enum { CLASSES(NAMED) CLASS_COUNT };
#undef NAMED
#define NAMED(class, field) class##_##field,
enum { FIELDS(NAMED) FIELD_COUNT };
#undef NAMED

extern Py_ssize_t field_places[FIELD_COUNT];
extern PyObject *field_classes[CLASS_COUNT]; /* NULL until they are learnt */
extern const int field_owners[FIELD_COUNT];  /* by field, its class */

/* Return whether an object is of a class of the table, or of one derived from it. */
int is_of(PyObject *object, int class);

/* Where a field of an object lies, which `is_of` its class. */
static inline PyObject **field(PyObject *object, int which)
{
    return (PyObject **)((char *)object + field_places[which]);
}

/* A field's value, borrowed; None where it has none. */
static inline PyObject *get(PyObject *object, int which)
{
    PyObject *found = *field(object, which);
    return found == NULL ? Py_None : found;
}

/* Give a field a value that is the caller's, and then the field's. -1: it is NULL, an error. */
static inline int put(PyObject *object, int which, PyObject *value)
{
    PyObject **place = field(object, which), *before = *place;
    if (value == NULL)
        return -1;
    *place = value;
    Py_XDECREF(before);
    return 0;
}

/* Add an integer to a field. */
static inline int add(PyObject *object, int which, PyObject *number)
{
    return put(object, which, PyNumber_Add(get(object, which), number));
}

/* Read an integer; 0: it is none, or too large. No error is set. */
static inline int read_integer(PyObject *value, long long *found)
{
    int beyond = 0;
    if (!PyLong_Check(value))
        return 0;
    *found = PyLong_AsLongLongAndOverflow(value, &beyond);
    return !beyond;
}

/* Return whether a value is true in a condition; -1: an error is set. */
static inline int is_true(PyObject *value)
{
    return value == Py_None || value == Py_False ? 0
           : value == Py_True                    ? 1
                                                 : PyObject_IsTrue(value);
}

#endif
