/* Decodes coded gradients of a whole model: `aiops.codecs.whole_gradient.WholeGradient`.
 *
 * The lengths and places of all payloads are fixed when an `Answers` is made. No byte of a peer's is
 * one: the prefixes between payloads are compared with those.
 */

#include "answers.h"

#define PREFIX 5
#define BINARY 0xC6 /* MessagePack's bin 32 */

int decode_all(const Answers *self, const char *region)
{
    for (Py_ssize_t index = 0; index < self->piece_count; index++) {
        const Piece *piece = &self->pieces[index];
        const char *payload = region + piece->begin;
        char *to = (char *)self->decoded.buf + piece->start;
        const unsigned char *prefix = (const unsigned char *)payload - PREFIX;
        if (index && (prefix[0] != BINARY ||
                      read_number(prefix + 1, 4) != (uint64_t)piece->nbytes))
            return 0;
        if (piece->decode != NULL) {
            if (!piece->decode((piece->stop - piece->start) / 4, payload, payload + piece->second,
                               to))
                return 0;
            continue;
        }
        memcpy(to, payload, (size_t)piece->nbytes);
        if (!are_fit(to, piece->nbytes))
            return 0;
    }
    return 1;
}

void forget_pieces(Answers *self)
{
    PyMem_Free(self->pieces);
    PyMem_Free(self->ages);
    PyBuffer_Release(&self->decoded);
    self->pieces = NULL;
    self->ages = NULL;
}

/* Take a piece; return whether it lies in the region, and for the model. */
static int take_piece(const Answers *self, PyObject *given, Py_ssize_t at, Piece *piece)
{
    PyObject *address;
    if (!PyTuple_Check(given) ||
        !PyArg_ParseTuple(given, "Onnnnn", &address, &piece->begin, &piece->nbytes, &piece->start,
                          &piece->stop, &piece->second))
        return 0;
    piece->decode = (Decode)(uintptr_t)PyLong_AsVoidPtr(address);
    return !PyErr_Occurred() && piece->begin >= at && piece->nbytes > 0 &&
           piece->begin <= self->region - piece->nbytes && piece->start >= 0 &&
           piece->start < piece->stop && piece->stop <= self->nbytes &&
           (piece->stop - piece->start) % 4 == 0 && piece->second >= 0 &&
           piece->second <= piece->nbytes &&
           (piece->decode != NULL || piece->nbytes == piece->stop - piece->start);
}

/* Take where the version of a push stands for each further part. */
static int take_ages(Answers *self, PyObject *given)
{
    self->age_count = PyTuple_Size(given);
    if ((self->ages = PyMem_Calloc((size_t)self->age_count + 1, sizeof *self->ages)) == NULL)
        return 0;
    for (Py_ssize_t index = 0; index < self->age_count; index++) {
        self->ages[index] = PyLong_AsSsize_t(PyTuple_GetItem(given, index));
        if (self->ages[index] < 0 ||
            self->ages[index] > self->form.len - self->pushed[PUSHED - 1].width)
            return 0;
    }
    return 1;
}

int take_pieces(Answers *self, PyObject *given)
{
    PyObject *ages, *pieces, *gradient;
    self->region = self->nbytes;
    if (given == Py_None)
        return 1;
    if (!PyTuple_Check(given) ||
        !PyArg_ParseTuple(given, "O!O!Onn", &PyTuple_Type, &ages, &PyTuple_Type, &pieces, &gradient,
                          &self->region, &self->between) ||
        PyObject_GetBuffer(gradient, &self->decoded, PyBUF_WRITABLE) < 0)
        return 0;
    Py_ssize_t count = PyTuple_Size(pieces), at = 0;
    if (count <= 0 || self->region <= 0 || self->region > self->nbytes || self->between < 0 ||
        self->between >= self->region || self->decoded.len != self->nbytes ||
        self->section_count != 1 || self->sections[0].itemsize != 4 || !take_ages(self, ages) ||
        (self->pieces = PyMem_Calloc((size_t)count, sizeof *self->pieces)) == NULL)
        return 0;
    for (Py_ssize_t index = 0; index < count; index++) {
        if (!take_piece(self, PyTuple_GetItem(pieces, index), at, &self->pieces[index]))
            return 0;
        at = self->pieces[index].begin + self->pieces[index].nbytes + PREFIX;
    }
    self->piece_count = count;
    return 1;
}
