/* Call a rule's loop by its address: `aiops.kernels.numba_kernel.NumbaKernel.direct`. */

#include "answers.h"

static const char arguments[] =
    "count size lo hi src step more factor base grad target state_0 state_1 state_2 state_3 "
    "state_4 state_5 state_6 state_7 constants sums"; /* aiops.kernels.numba_source.DIRECT */

/* From so many bytes on other threads may run meanwhile. */
#define LONG (32 << 10)

/* Take a view of numbers of a kind, by its `struct` code, in `nbytes` bytes. 0: they do not fit. */
static int take_view(PyObject *array, char code, Py_ssize_t nbytes, Py_buffer *view)
{
    if (PyObject_GetBuffer(array, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) < 0)
        return (PyErr_Clear(), 0);
    const char *format = view->format == NULL ? "B" : view->format;
    int same = code == 'd' ? strcmp(format, "d") == 0
                           : view->itemsize == 8 && (*format == 'l' || *format == 'q');
    if (same && view->len == nbytes)
        return 1;
    PyBuffer_Release(view);
    return 0;
}

void forget_kernel(Loop *loop)
{
    Py_buffer *views[] = {&loop->lo, &loop->hi, &loop->src, &loop->constants};
    for (int index = 0; index < 4; index++)
        if (views[index]->obj != NULL)
            PyBuffer_Release(views[index]);
    Py_CLEAR(loop->kernel);
    *loop = (Loop){.kernel = NULL};
}

/* Find the address of a section's kernel, and what all of its calls have in common; return whether
 * it has one. */
static int find_loop(Answers *self, Py_ssize_t index, PyObject *kernel)
{
    Loop *loop = &self->loops[index];
    PyObject *span = PyTuple_GetItem(self->part[PART_spans], index); /* lo, hi, src, rows, factor */
    if (loop->kernel == kernel)
        return 1;
    forget_kernel(loop);
    PyObject *address = PyObject_GetAttr(kernel, names[NAME_direct]), *constants = NULL;
    if (address != NULL && PyLong_Check(address))
        loop->run = (Direct)(uintptr_t)PyLong_AsVoidPtr(address);
    Py_XDECREF(address);
    Py_ssize_t size = PyObject_Size(PyTuple_GetItem(span, 0));
    loop->count = size;
    int sound = loop->run != NULL && size > 0 && !PyErr_Occurred() &&
                (constants = PyObject_GetAttr(kernel, names[NAME_constants])) != NULL &&
                PyObject_GetBuffer(constants, &loop->constants, PyBUF_SIMPLE) == 0 &&
                take_view(PyTuple_GetItem(span, 0), 'q', 8 * size, &loop->lo) &&
                take_view(PyTuple_GetItem(span, 1), 'q', 8 * size, &loop->hi) &&
                take_view(PyTuple_GetItem(span, 2), 'q', 8 * size, &loop->src);
    Py_XDECREF(constants);
    if (!sound)
        return (PyErr_Clear(), forget_kernel(loop), 0);
    loop->kernel = Py_NewRef(kernel);
    return 1;
}

/* Return the learning rates of an update, float64[tensors], and keep a view of those that are
 * likely to come again. NULL: they do not fit. */
static const double *rates_of(Answers *self, const Pushed *push, PyObject *steps)
{
    Rates *known = &self->rates[push->staleness % RATES];
    if (known->array == steps)
        return known->view.buf;
    if (known->array != NULL) {
        PyBuffer_Release(&known->view);
        Py_CLEAR(known->array);
    }
    if (!take_view(steps, 'd', 8 * self->tensors, &known->view))
        return NULL;
    known->array = Py_NewRef(steps);
    return known->view.buf;
}

int run_loops(Answers *self, const Pushed *push, PyObject *base, PyObject *room, PyObject *steps,
              PyObject *scalars)
{
    Py_buffer source, target, more = {0}, views[SECTIONS * STATES];
    int taken = 0, done = 0;
    const double *rates;
    int64_t *sums = self->sums;
    for (Py_ssize_t index = 0; index < self->section_count; index++)
        if (!find_loop(self, index, PyList_GetItem(self->part[PART_kernels], index)) ||
            PyList_GetItem(self->part[PART_masters], index) != Py_None)
            return (PyErr_Clear(), 0);
    if ((rates = rates_of(self, push, steps)) == NULL ||
        (scalars == Py_None) != (self->scalar_count == 0) ||
        PyObject_GetBuffer(get(room, Arena_data), &target, PyBUF_WRITABLE) < 0)
        return (PyErr_Clear(), 0);
    if (PyObject_GetBuffer(get(base, Arena_data), &source, PyBUF_SIMPLE) < 0) {
        PyBuffer_Release(&target);
        return (PyErr_Clear(), 0);
    }
    int sound = target.len == self->nbytes && source.len == self->nbytes &&
                (scalars == Py_None ||
                 take_view(scalars, 'd', 8 * self->tensors * self->scalar_count, &more));
    void *state[SECTIONS][STATES] = {{NULL}};
    for (Py_ssize_t index = 0; sound && index < self->section_count; index++) {
        PyObject *arrays = PyList_GetItem(self->part[PART_states], index);
        sound = arrays != NULL && PyTuple_Check(arrays) && PyTuple_Size(arrays) <= STATES;
        for (Py_ssize_t part = 0; sound && part < PyTuple_Size(arrays); part++) {
            Py_buffer *view = &views[taken];
            if (!(sound = PyObject_GetBuffer(PyTuple_GetItem(arrays, part), view,
                                             PyBUF_WRITABLE) == 0))
                break;
            taken++;
            sound = view->len == self->sections[index].nbytes;
            state[index][part] = view->buf;
        }
    }
    if (sound) {
        PyThreadState *thread = self->nbytes >= LONG ? PyEval_SaveThread() : NULL;
        char *to = target.buf;
        const char *was = source.buf, *from = push->data;
        const double *rest = more.buf;
        done = 1;
        for (Py_ssize_t index = 0; index < self->section_count; index++) {
            const Surveyed *section = &self->sections[index];
            const Loop *loop = &self->loops[index];
            void **each = state[index];
            sums[loop->count] = 0;
            loop->run(loop->count, section->nbytes / section->itemsize, loop->lo.buf, loop->hi.buf,
                      loop->src.buf, rates, rest, 1.0, was, from, to, each[0], each[1], each[2],
                      each[3], each[4], each[5], each[6], each[7], loop->constants.buf, sums);
            if (sums[loop->count] != 1) /* it has said why */
                done = -1;
            to += section->nbytes;
            was += section->nbytes;
            from += section->nbytes;
            rates += loop->count;
            sums += loop->count;
            rest = rest == NULL ? NULL : rest + loop->count * self->scalar_count;
        }
        if (thread != NULL)
            PyEval_RestoreThread(thread);
    }
    while (taken > 0)
        PyBuffer_Release(&views[--taken]);
    if (more.obj != NULL)
        PyBuffer_Release(&more);
    PyBuffer_Release(&source);
    PyBuffer_Release(&target);
    if (done < 0)
        PyErr_SetString(PyExc_ValueError, "the arguments of a kernel do not fit");
    else
        PyErr_Clear();
    self->direct += done > 0;
    return done;
}

PyObject *sums_of(const Answers *self)
{
    PyObject *made = PyObject_CallFunction(self->part[PART_zeros], "n", self->tensors);
    Py_buffer view;
    if (made == NULL || PyObject_GetBuffer(made, &view, PyBUF_WRITABLE) < 0) {
        Py_XDECREF(made);
        return NULL;
    }
    if (view.len == 8 * self->tensors)
        memcpy(view.buf, self->sums, (size_t)view.len);
    else
        PyErr_SetString(PyExc_ValueError, "sums are int64, one for each tensor");
    PyBuffer_Release(&view);
    if (PyErr_Occurred())
        Py_CLEAR(made);
    return made;
}

int add_kernel(PyObject *module)
{
    return PyModule_AddStringConstant(module, "DIRECT", arguments);
}
