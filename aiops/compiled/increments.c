/* Takes usual steps of the delta replica: `aiops.store.delta_replica.WholeSteps`, which is used as
 * `DeltaReplica.encode` is, the specification. It also keeps the forms of answers, by the number of
 * increments in them, which `aiops.engine.coded_answers` teaches it.
 *
 * Nothing here comes from a peer. Places and lengths are checked when they are given, and arrays for
 * their lengths at each call.
 */

#include "increments.h"

#define BINARY 0xC6 /* MessagePack's bin 32 */

/* A loop that encodes a difference, and adds it: aiops.codecs.block_codec.Entries. */
typedef int64_t (*Follow)(int64_t size, const void *values, void *held, void *room, void *first,
                          void *second);

typedef struct {
    Follow follow; /* NULL: its values are copied */
    Py_ssize_t start, stop, begin, nbytes, second;
} Piece;

typedef struct {
    PyObject_HEAD
    Piece *pieces;
    Py_ssize_t count, nbytes, region; /* pieces; bytes of the model, and of an increment */
    float *room;                      /* for the largest difference */
    Form *forms[MOST_STEPS + 1];
    int complete;
} Increments;

static PyObject *type;

int is_increments(PyObject *object)
{
    return (PyObject *)Py_TYPE(object) == type;
}

const Form *form_of(PyObject *object, Py_ssize_t count)
{
    return count > MOST_STEPS ? NULL : ((Increments *)object)->forms[count];
}

int find_payloads(const Form *form, PyObject *regions, const Py_buffer *replica,
                  struct iovec *pieces)
{
    for (Py_ssize_t index = 0; index < form->segment_count; index++) {
        const Segment *segment = &form->segments[index];
        char *from = replica->buf;
        Py_ssize_t size = replica->len;
        if (segment->source >= 0) {
            PyObject *region = PyTuple_GetItem(regions, segment->source);
            if (region == NULL || !PyBytes_Check(region))
                return 0;
            from = PyBytes_AsString(region);
            size = PyBytes_Size(region);
        }
        if (segment->begin > size - segment->nbytes)
            return 0;
        *pieces++ = (struct iovec){form->prefixes + PREFIX * index, PREFIX};
        *pieces++ = (struct iovec){from + segment->begin, (size_t)segment->nbytes};
    }
    return 1;
}

/* Take a step of a piece; return its result. */
static int64_t step_of(Increments *self, const Piece *piece, const char *model, char *replica,
                       char *region, char *behind)
{
    Py_ssize_t nbytes = piece->stop - piece->start;
    const char *values = model + piece->start;
    char *held = replica + piece->start, *payload = region + piece->begin;
    *behind = 0;
    if (piece->follow != NULL) {
        int64_t done = piece->follow(nbytes / 4, values, held, self->room, payload,
                                     payload + piece->second);
        *behind = done == 1;
        if (done > 0)
            return piece->nbytes;
        memset(payload, 0, (size_t)piece->nbytes);
        self->complete = 0;
    }
    memcpy(held, values, (size_t)nbytes);
    return -1; /* aiops.store.delta_replica.WHOLE */
}

static PyObject *step(PyObject *object, PyObject *const *given, Py_ssize_t count)
{
    Increments *self = (Increments *)object;
    Py_buffer views[4];
    int taken = 0;
    PyObject *region = NULL;
    if (count != 4) {
        PyErr_SetString(PyExc_TypeError, "step takes the model, the replica, results and behind");
        return NULL;
    }
    for (; taken < 4; taken++)
        if (PyObject_GetBuffer(given[taken], &views[taken], taken ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0)
            break;
    if (taken == 4 && views[0].len == self->nbytes && views[1].len == self->nbytes &&
        views[2].len == 8 * self->count && views[3].len == self->count)
        region = PyBytes_FromStringAndSize(NULL, self->region);
    else if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "these are not arrays of the replica");
    if (region != NULL) {
        char *bytes = PyBytes_AsString(region);
        self->complete = 1;
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t index = 0; index < self->count; index++) {
            int64_t result = step_of(self, &self->pieces[index], views[0].buf, views[1].buf, bytes,
                                     (char *)views[3].buf + index);
            memcpy((char *)views[2].buf + 8 * index, &result, sizeof result);
        }
        Py_END_ALLOW_THREADS
    }
    while (taken > 0)
        PyBuffer_Release(&views[--taken]);
    return region;
}

static void forget(Form *form)
{
    if (form == NULL)
        return;
    Py_XDECREF(form->header);
    Py_XDECREF(form->whole);
    Py_XDECREF(form->overhead);
    Py_XDECREF(form->payload);
    Py_XDECREF(form->parts);
    PyMem_Free(form->ages);
    PyMem_Free(form->segments);
    PyMem_Free(form->prefixes);
    PyMem_Free(form);
}

/* Take places of 8 bytes in the header; return whether they lie there. */
static int take_places(const Form *form, PyObject *given, Py_ssize_t *places, Py_ssize_t width)
{
    for (Py_ssize_t index = 0; index < PyTuple_Size(given); index++) {
        places[index] = PyLong_AsSsize_t(PyTuple_GetItem(given, index));
        Py_ssize_t bytes = index == COUNTED - 1 ? width : 8;
        if (places[index] < 0 || bytes < 0 || places[index] > PyBytes_Size(form->header) - bytes)
            return 0;
    }
    return 1;
}

/* Take the payloads of an answer with `steps` increments; return whether they lie in those. */
static int take_segments(const Increments *self, Form *form, PyObject *given, Py_ssize_t steps)
{
    Py_ssize_t payload = 0;
    for (Py_ssize_t index = 0; index < form->segment_count; index++) {
        Segment *segment = &form->segments[index];
        PyObject *row = PyTuple_GetItem(given, index);
        if (!PyTuple_Check(row) || !PyArg_ParseTuple(row, "nnn", &segment->source, &segment->begin,
                                                     &segment->nbytes))
            return 0;
        Py_ssize_t size = segment->source < 0 ? self->nbytes : self->region;
        if (segment->source >= steps || segment->begin < 0 || segment->nbytes <= 0 ||
            segment->nbytes > size || segment->begin > size - segment->nbytes)
            return 0;
        payload += segment->nbytes;
        char *prefix = form->prefixes + PREFIX * index;
        *prefix = (char)BINARY;
        for (int byte = 1; byte < PREFIX; byte++)
            prefix[byte] = (char)(segment->nbytes >> 8 * (PREFIX - 1 - byte));
    }
    Py_ssize_t overhead = PyBytes_Size(form->header) + PREFIX * form->segment_count;
    form->size = overhead + payload;
    form->whole = PyLong_FromSsize_t(form->size);
    form->overhead = PyLong_FromSsize_t(overhead);
    form->payload = PyLong_FromSsize_t(payload);
    return form->whole != NULL && form->overhead != NULL && form->payload != NULL;
}

static PyObject *learn(PyObject *object, PyObject *given)
{
    Increments *self = (Increments *)object;
    Py_ssize_t steps, width;
    PyObject *header, *places, *ages, *segments, *parts;
    if (!PyArg_ParseTuple(given, "nSO!O!O!nO!", &steps, &header, &PyTuple_Type, &places,
                          &PyTuple_Type, &ages, &PyTuple_Type, &segments, &width, &PyTuple_Type,
                          &parts))
        return NULL;
    Form *form = PyMem_Calloc(1, sizeof *form);
    if (form == NULL)
        return PyErr_NoMemory();
    form->header = Py_NewRef(header);
    form->parts = Py_NewRef(parts);
    form->age_count = PyTuple_Size(ages);
    form->segment_count = PyTuple_Size(segments);
    form->ages = PyMem_Calloc((size_t)form->age_count + 1, sizeof *form->ages);
    form->segments = PyMem_Calloc((size_t)form->segment_count + 1, sizeof *form->segments);
    form->prefixes = PyMem_Malloc(PREFIX * (size_t)form->segment_count + 1);
    if (form->ages != NULL && form->segments != NULL && form->prefixes != NULL && steps >= 0 && steps <= MOST_STEPS &&
        (PyTuple_Size(places) == COUNTED || PyTuple_Size(places) == COUNTED - 2) &&
        form->age_count == form->segment_count && form->segment_count <= MOST_PIECES &&
        take_places(form, places, form->at, width) && take_places(form, ages, form->ages, 8) &&
        take_segments(self, form, segments, steps)) {
        forget(self->forms[steps]);
        self->forms[steps] = form;
        Py_RETURN_NONE;
    }
    forget(form);
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "this is no form of an answer");
    return NULL;
}

static PyObject *knows(PyObject *object, PyObject *steps)
{
    Py_ssize_t count = PyLong_AsSsize_t(steps);
    if (count < 0 && PyErr_Occurred())
        return NULL;
    return PyBool_FromLong(count >= 0 && form_of(object, count) != NULL);
}

static void end(PyObject *object)
{
    Increments *self = (Increments *)object;
    PyTypeObject *own = Py_TYPE(object);
    for (int index = 0; index <= MOST_STEPS; index++)
        forget(self->forms[index]);
    PyMem_Free(self->pieces);
    PyMem_Free(self->room);
    ((freefunc)PyType_GetSlot(own, Py_tp_free))(object);
    Py_DECREF(own);
}

/* Take a piece; return whether it lies in the model, and in an increment. */
static int take_piece(const Increments *self, PyObject *given, Piece *piece)
{
    PyObject *address;
    if (!PyTuple_Check(given) ||
        !PyArg_ParseTuple(given, "Onnnnn", &address, &piece->start, &piece->stop, &piece->begin,
                          &piece->nbytes, &piece->second))
        return 0;
    piece->follow = (Follow)(uintptr_t)PyLong_AsVoidPtr(address);
    if (PyErr_Occurred() || piece->start < 0 || piece->start > piece->stop ||
        piece->stop > self->nbytes)
        return 0;
    return piece->follow == NULL ||
           ((piece->stop - piece->start) % 4 == 0 && piece->begin >= 0 && piece->nbytes > 0 &&
            piece->nbytes <= self->region && piece->begin <= self->region - piece->nbytes &&
            piece->second >= 0 && piece->second <= piece->nbytes);
}

static PyObject *make(PyTypeObject *given_type, PyObject *given, PyObject *names)
{
    PyObject *pieces;
    Py_ssize_t largest = 0;
    Increments *self = (Increments *)((allocfunc)PyType_GetSlot(given_type, Py_tp_alloc))(given_type, 0);
    if (self == NULL || !PyArg_ParseTuple(given, "O!nn", &PyTuple_Type, &pieces, &self->nbytes,
                                          &self->region)) {
        Py_XDECREF((PyObject *)self);
        return NULL;
    }
    self->count = PyTuple_Size(pieces);
    int sound = names == NULL && self->count > 0 && self->count <= MOST_PIECES && self->nbytes > 0 &&
                self->region >= 0 && self->region < self->nbytes &&
                (self->pieces = PyMem_Calloc((size_t)self->count, sizeof *self->pieces)) != NULL;
    for (Py_ssize_t index = 0; sound && index < self->count; index++) {
        const Piece *piece = &self->pieces[index];
        sound = take_piece(self, PyTuple_GetItem(pieces, index), &self->pieces[index]);
        if (sound && piece->follow != NULL && piece->stop - piece->start > largest)
            largest = piece->stop - piece->start;
    }
    if (sound && (self->room = PyMem_Malloc((size_t)largest + 4)) != NULL)
        return (PyObject *)self;
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "these are not the pieces of a replica");
    Py_DECREF(self);
    return NULL;
}

static PyMethodDef methods[] = {
    {"step", (PyCFunction)(void (*)(void))step, METH_FASTCALL, "See _core.pyi."},
    {"learn", learn, METH_VARARGS, "See _core.pyi."},
    {"knows", knows, METH_O, "See _core.pyi."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"complete", T_INT, offsetof(Increments, complete), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot type_slots[] = {
    {Py_tp_new, make}, {Py_tp_dealloc, end}, {Py_tp_methods, methods}, {Py_tp_members, members},
    {0, NULL},
};

static PyType_Spec type_spec = {
    "aiops.compiled._core.Increments", sizeof(Increments), 0, Py_TPFLAGS_DEFAULT, type_slots,
};

int add_increments(PyObject *module)
{
    type = PyType_FromSpec(&type_spec);
    return type == NULL ? -1 : PyModule_AddObjectRef(module, "Increments", type);
}
