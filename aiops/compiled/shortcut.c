/* The type `Answers`: one connection's short way, made of the parts that Python's has. */

#include "answers.h"

#define NAME(name) #name,
static const char *const part_names[PART_COUNT] = {PARTS(NAME) SERVER_PARTS(NAME)};
#undef NAME

/* Of these, the class in fields.h that each must be of; the others are called, or looked into. */
static const struct { int part, class; } checked[] = {
    {PART_wire, Connection_class}, {PART_member, Member_class}, {PART_store, Store_class},
    {PART_pool, SnapshotPool_class}, {PART_updates, UpdateQueue_class},
    {PART_held, HeldPushes_class}, {PART_maker, UpdateMaker_class},
    {PART_collected, CollectedSum_class}, {PART_warnings, RunWarnings_class},
    {PART_closure, PushClosure_class}, {PART_guard, FiniteGuard_class},
    {PART_histogram, StalenessHistogram_class}, {PART_pace, Pace_class},
    {PART_gradient, Arena_class}, {PART_recent, RecentStaleness_class},
};

static int traverse(PyObject *object, visitproc visit, void *arg)
{
    Answers *self = (Answers *)object;
    Py_VISIT(Py_TYPE(object));
    for (int index = 0; index < PART_COUNT; index++)
        Py_VISIT(self->part[index]);
    return 0;
}

static int clear(PyObject *object)
{
    Answers *self = (Answers *)object;
    for (int index = 0; index < PART_COUNT; index++)
        Py_CLEAR(self->part[index]);
    return 0;
}

static void end(PyObject *object)
{
    Answers *self = (Answers *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    clear(object);
    Py_buffer *buffers[] = {&self->head, &self->form, &self->varies, &self->answer};
    for (int index = 0; index < 4; index++)
        PyBuffer_Release(buffers[index]);
    for (int index = 0; index < SECTIONS; index++)
        forget_kernel(&self->loops[index]);
    for (int index = 0; index < RATES; index++) {
        if (self->rates[index].array != NULL)
            PyBuffer_Release(&self->rates[index].view);
        Py_CLEAR(self->rates[index].array);
    }
    forget_pieces(self);
    PyMem_Free(self->header);
    PyMem_Free(self->sums);
    Py_CLEAR(self->peer);
    Py_CLEAR(self->one);
    for (int index = 0; index < NUMBERS_KEPT; index++)
        Py_CLEAR(self->number_of[index]);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

/* Take parts from the attributes of an object. */
static int take(Answers *self, PyObject *given, int first, int end)
{
    for (int index = first; index < end; index++) {
        PyObject *before = self->part[index];
        if ((self->part[index] = PyObject_GetAttrString(given, part_names[index])) == NULL) {
            self->part[index] = before;
            return 0;
        }
        Py_XDECREF(before);
    }
    return 1;
}

/* Take the parts of an exchange, and check those whose fields are used. */
static int take_parts(Answers *self, PyObject *given)
{
    if (!take(self, given, 0, ENGINE_PARTS))
        return 0;
    int sound = PyDict_Check(self->part[PART_even]) && PyList_Check(self->part[PART_kernels]) &&
                PyList_Check(self->part[PART_masters]) && PyList_Check(self->part[PART_states]) &&
                PyTuple_Check(self->part[PART_recorded]) &&
                PyTuple_Size(self->part[PART_recorded]) == 3 &&
                PyBytes_Check(PyTuple_GetItem(self->part[PART_recorded], 1)) &&
                PyTuple_Check(self->part[PART_spans]) &&
                PyTuple_Size(self->part[PART_spans]) == self->section_count;
    for (size_t index = 0; index < sizeof checked / sizeof *checked; index++)
        sound = sound && is_of(self->part[checked[index].part], checked[index].class);
    sound = sound && (!is_coded(self) || (is_increments(self->part[PART_increments]) &&
                                          is_of(self->part[PART_delta], DeltaReplies_class) &&
                                          is_of(self->part[PART_replica], SnapshotPool_class)));
    for (Py_ssize_t index = 0; sound && index < self->section_count; index++) {
        PyObject *span = PyTuple_GetItem(self->part[PART_spans], index);
        PyObject *states = PyList_GetItem(self->part[PART_states], index);
        sound = PyTuple_Check(span) && PyTuple_Size(span) == 5 && states != NULL &&
                PyTuple_Check(states) && PyTuple_Size(states) <= STATES;
        Py_ssize_t count = sound ? PyObject_Size(PyTuple_GetItem(span, 0)) : -1;
        sound = sound && count >= 0;
        self->tensors += count;
    }
    return sound;
}

/* Take where numbers lie in a push and in an answer; return whether they lie there. */
static int take_slots(Answers *self, PyObject *pushed, PyObject *answered)
{
    self->answer_count = (int)PyTuple_Size(answered);
    int sound = PyTuple_Size(pushed) == PUSHED &&
                self->answer_count == (self->has_statistic ? 8 : 6);
    for (int index = 0; sound && index < PUSHED; index++) {
        PushSlot *slot = &self->pushed[index];
        sound = PyArg_ParseTuple(PyTuple_GetItem(pushed, index), "nnp", &slot->begin, &slot->width,
                                 &slot->sign) &&
                slot->width >= 1 && slot->width <= 8 && slot->begin >= 0 &&
                slot->begin <= self->form.len - slot->width;
    }
    Py_ssize_t end = 0;
    for (int index = 0; sound && index < self->answer_count; index++) {
        Py_ssize_t width = self->has_statistic && index == 6 ? self->vbars_width : 8;
        Py_ssize_t at = self->answer_at[index] = PyLong_AsSsize_t(PyTuple_GetItem(answered, index));
        sound = at >= end && width >= 0 && at <= self->answer.len - width;
        end = at + width;
    }
    return sound;
}

/* Take what is surveyed of each section; return whether they are the model. */
static int take_sections(Answers *self, PyObject *given)
{
    Py_ssize_t total = 0;
    int sound = (self->section_count = PyTuple_Size(given)) >= 1 && self->section_count <= SECTIONS;
    for (Py_ssize_t index = 0; sound && index < self->section_count; index++) {
        Surveyed *section = &self->sections[index];
        unsigned long long mask, limit;
        sound = PyArg_ParseTuple(PyTuple_GetItem(given, index), "nnKK", &section->nbytes,
                                 &section->itemsize, &mask, &limit);
        section->mask = mask;
        section->limit = limit;
        Py_ssize_t size = section->itemsize;
        sound = sound && (size == 2 || size == 4 || size == 8) && section->nbytes >= 0 &&
                section->nbytes % size == 0 && (size == 8 || mask >> (8 * size - 1) == 0);
        total += sound ? section->nbytes : 0;
    }
    return sound && total == self->nbytes;
}

/* Keep the integers by which accounts grow. */
static int keep_numbers(Answers *self)
{
    Py_ssize_t numbers[] = {self->form.len + self->between, self->nbytes, self->answer.len,
                            self->answer.len + self->nbytes, self->region - self->between};
    for (int index = 0; index < NUMBERS_KEPT; index++)
        if ((self->number_of[index] = PyLong_FromSsize_t(numbers[index])) == NULL)
            return 0;
    return (self->one = PyLong_FromLong(1)) != NULL;
}

static PyObject *make(PyTypeObject *type, PyObject *given, PyObject *names)
{
    PyObject *parts, *pushed, *answered, *sections, *peer, *coded;
    Answers *self = (Answers *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL ||
        !PyArg_ParseTuple(given, "OO!w*y*y*y*O!O!O!nnnLpipO", &parts, &PyLong_Type, &peer,
                          &self->head, &self->form, &self->varies, &self->answer, &PyTuple_Type,
                          &pushed, &PyTuple_Type, &answered, &PyTuple_Type, &sections,
                          &self->nbytes, &self->cost, &self->vbars_width, &self->parameters,
                          &self->scheduled, &self->scalar_count, &self->has_statistic,
                          &coded)) {
        Py_XDECREF((PyObject *)self);
        return NULL;
    }
    self->fd = -1;
    self->peer = Py_NewRef(peer);
    if (names == NULL && self->nbytes > 0 && self->parameters > 0 && self->form.len > 0 &&
        self->varies.len == self->form.len && take_slots(self, pushed, answered) &&
        take_sections(self, sections) && take_pieces(self, coded) &&
        self->head.len >= self->form.len + self->region && take_parts(self, parts) && keep_numbers(self) &&
        self->scalar_count >= 0 && self->scalar_count <= SCALARS &&
        (self->header = PyMem_Malloc((size_t)self->answer.len)) != NULL &&
        (self->sums = PyMem_Malloc((size_t)(self->tensors + 1) * sizeof *self->sums)) != NULL)
        return (PyObject *)self;
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "these are not the parts of a steady exchange");
    Py_DECREF(self);
    return NULL;
}

static PyObject *exchange_method(PyObject *object, PyObject *const *given, Py_ssize_t count)
{
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "exchange takes bytes received, the time and a record");
        return NULL;
    }
    ((Answers *)object)->fd = -1;
    ((Answers *)object)->header_at = NULL;
    return exchange((Answers *)object, given[0], given[1], given[2], Py_None);
}

/* Have the server end because of the error that is set, as `EventDispatcher.exchange` does. */
static PyObject *failed(const Answers *self)
{
    PyObject *type, *error, *trace;
    if (!PyErr_ExceptionMatches(PyExc_Exception))
        return NULL;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (trace != NULL)
        PyException_SetTraceback(error, trace);
    PyObject *found = PyObject_CallFunctionObjArgs(self->part[PART_failed], error, NULL);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(trace);
    Py_XDECREF(found);
    return found == NULL ? NULL : PyBytes_FromStringAndSize(NULL, 0);
}

/* Keep an answer that has to wait for its row; return b"" if it has: `Recorder.hold`. */
static PyObject *hold(const Answers *self, PyObject *state, PyObject *found)
{
    PyObject *held = PyObject_CallMethod(get(state, KeptState_recorder), "hold", "OO", self->peer,
                                         found);
    int waits = held == NULL ? -1 : is_true(held);
    Py_XDECREF(held);
    if (waits == 0)
        return found;
    Py_DECREF(found);
    return waits < 0 ? NULL : PyBytes_FromStringAndSize(NULL, 0);
}

/* Answer as `EventDispatcher.exchange` does, which is asked where a shard's state is kept. */
PyObject *answer(PyObject *object, PyObject *received)
{
    Answers *self = (Answers *)object;
    PyObject *dispatcher = self->part[PART_dispatcher], *runner = self->part[PART_runner];
    PyObject *state = self->part[PART_run_state], *files = self->part[PART_persistence];
    PyObject *record = Py_None, *busy_poll = self->part[PART_busy_poll];
    if (dispatcher == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "it is not connected to a server");
        return NULL;
    }
    PyObject *kept = get(state, RunState_kept);
    if (kept != Py_None && !is_of(kept, KeptState_class)) {
        bring_payload(self);
        return PyObject_CallFunctionObjArgs(self->part[PART_exchange], received, NULL);
    }
    if (is_true(get(dispatcher, EventDispatcher__handling)) != 0 ||
        is_true(get(dispatcher, EventDispatcher_broken)) != 0 ||
        !((double)self->cost <= PyFloat_AsDouble(get(runner, EffectRunner_at_once))))
        return (PyErr_Clear(), Py_NewRef(Py_None));
    if (kept != Py_None)
        record = get(kept, KeptState_record);
    else if (files != Py_None && is_of(files, Persistence_class))
        record = get(files, Persistence_exchanges);
    if (record != Py_None) /* what is recorded must stay, whatever the sender does */
        bring_payload(self);
    PyObject *now = PyObject_CallNoArgs(self->part[PART_clock]);
    PyObject *found = now == NULL ? NULL : exchange(self, received, now, record, kept);
    Py_XDECREF(now);
    if (found == NULL)
        return failed(self);
    if (found == Py_None || (PyBytes_Check(found) && PyBytes_Size(found) == 0))
        return found;
    if (self->header_at == NULL && /* `Mailboxes` looks for the next one itself */
        put(busy_poll, BusyPoll_received, Py_NewRef(Py_True)) == 0 &&
        is_true(get(busy_poll, BusyPoll_idle)) != 0) {
        PyObject *begun = PyObject_CallMethod(busy_poll, "begin", NULL);
        Py_XDECREF(begun);
        if (begun == NULL)
            Py_CLEAR(found);
    }
    return found == NULL || kept == Py_None || self->kept ? found : hold(self, kept, found);
}

/* Take the parts of a server, with which `answer` may be called. */
static PyObject *connect_to(PyObject *object, PyObject *given)
{
    static const struct { int part, class; } wanted[] = {
        {PART_dispatcher, EventDispatcher_class}, {PART_runner, EffectRunner_class},
        {PART_run_state, RunState_class}, {PART_busy_poll, BusyPoll_class},
    };
    Answers *self = (Answers *)object;
    int sound = take(self, given, ENGINE_PARTS, PART_COUNT);
    for (size_t index = 0; sound && index < sizeof wanted / sizeof *wanted; index++)
        sound = is_of(self->part[wanted[index].part], wanted[index].class);
    if (sound)
        Py_RETURN_NONE;
    Py_CLEAR(self->part[PART_dispatcher]);
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "these are not the parts of a server");
    return NULL;
}

static PyObject *answer_method(PyObject *object, PyObject *received)
{
    ((Answers *)object)->fd = -1;
    ((Answers *)object)->header_at = NULL;
    return answer(object, received);
}

static PyMethodDef methods[] = {
    {"connect", connect_to, METH_O, "See _core.pyi."},
    {"exchange", (PyCFunction)(void (*)(void))exchange_method, METH_FASTCALL, "See _core.pyi."},
    {"answer", answer_method, METH_O, "See _core.pyi."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"answered", T_LONGLONG, offsetof(Answers, answered), READONLY, NULL},
    {"direct", T_LONGLONG, offsetof(Answers, direct), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot type_slots[] = {
    {Py_tp_new, make}, {Py_tp_dealloc, end}, {Py_tp_traverse, traverse}, {Py_tp_clear, clear},
    {Py_tp_methods, methods}, {Py_tp_members, members}, {0, NULL},
};

static PyType_Spec type_spec = {
    "aiops.compiled._core.Answers", sizeof(Answers), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    type_slots,
};

static PyObject *type;

int is_answers(PyObject *object)
{
    return (PyObject *)Py_TYPE(object) == type;
}

int add_answers(PyObject *module)
{
    PyObject *names = PyTuple_New(PART_COUNT);
    for (int index = 0; names != NULL && index < PART_COUNT; index++)
        PyTuple_SetItem(names, index, PyUnicode_FromString(part_names[index]));
    type = PyType_FromSpec(&type_spec);
    if (type == NULL || names == NULL || PyModule_AddObjectRef(module, "PARTS", names) < 0)
        return -1;
    return PyModule_AddObjectRef(module, "Answers", type);
}
