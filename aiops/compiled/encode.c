/* Encodes gradients of a whole model into one region: `aiops.client.coded_gradient.CodedGradient`.
 *
 * The loops are those that Python calls, by other addresses. The interpreter's lock is not needed.
 */

#include "exchange.h"

/* Have the encoders of the first pieces be as before the last gradient. */
static void restore(const Exchange *self, Py_ssize_t count)
{
    for (Py_ssize_t index = 0; index < count; index++) {
        const CodedPiece *piece = &self->pieces[index];
        if (piece->encode != NULL)
            memcpy(piece->rest.buf, piece->before.buf, (size_t)piece->rest.len);
    }
}

void take_back(Exchange *self)
{
    restore(self, self->piece_count);
}

/* Copy the tensors of a piece that travels raw. */
static void copy_tensors(const CodedPiece *piece, const Py_buffer *views, int by_name, char *to)
{
    if (!by_name) {
        memcpy(to, (const char *)views[0].buf + piece->start, (size_t)piece->nbytes);
        return;
    }
    for (Py_ssize_t tensor = piece->first; tensor < piece->last; tensor++) {
        memcpy(to, views[tensor].buf, (size_t)views[tensor].len);
        to += views[tensor].len;
    }
}

int encode_all(Exchange *self, const Py_buffer *views, int by_name)
{
    for (Py_ssize_t index = 0; index < self->piece_count; index++) {
        const CodedPiece *piece = &self->pieces[index];
        char *to = (char *)self->region.buf + piece->begin;
        if (piece->encode == NULL) {
            copy_tensors(piece, views, by_name, to);
            continue;
        }
        const char *from = by_name ? views[piece->first].buf
                                   : (const char *)views[0].buf + piece->start;
        if (!piece->encode(piece->rest.len / 4, from, piece->rest.buf, piece->before.buf, to,
                           to + piece->second)) {
            restore(self, index); /* those behind it have not been encoded */
            return 0;
        }
    }
    return 1;
}

void forget_coded(Exchange *self)
{
    for (Py_ssize_t index = 0; index < self->piece_count; index++) {
        PyBuffer_Release(&self->pieces[index].rest);
        PyBuffer_Release(&self->pieces[index].before);
    }
    PyMem_Free(self->pieces);
    PyBuffer_Release(&self->region);
    self->pieces = NULL;
    self->piece_count = 0;
}

/* Take a piece; return whether it lies in the region, and its tensors in the model. */
static int take_piece(Exchange *self, PyObject *given, CodedPiece *piece)
{
    PyObject *address, *rest, *before;
    if (!PyTuple_Check(given) ||
        !PyArg_ParseTuple(given, "OnnnnnnOO", &address, &piece->first, &piece->last, &piece->start,
                          &piece->begin, &piece->nbytes, &piece->second, &rest, &before))
        return 0;
    piece->encode = (Encode)(uintptr_t)PyLong_AsVoidPtr(address);
    Py_ssize_t tensors = PyTuple_Size(self->tensors), nbytes = piece->nbytes;
    if (PyErr_Occurred() || piece->first < 0 || piece->first >= piece->last ||
        piece->last > tensors || nbytes <= 0 || piece->begin < 0 ||
        piece->begin > self->region.len - nbytes || piece->start < 0 ||
        piece->start >= self->nbytes || piece->second < 0 || piece->second > nbytes)
        return 0;
    if (piece->encode == NULL)
        return nbytes <= self->nbytes - piece->start;
    return piece->last == piece->first + 1 &&
           PyObject_GetBuffer(rest, &piece->rest, PyBUF_WRITABLE) == 0 &&
           PyObject_GetBuffer(before, &piece->before, PyBUF_WRITABLE) == 0 &&
           piece->rest.len == piece->before.len && piece->rest.len % 4 == 0 &&
           piece->rest.len <= self->nbytes - piece->start;
}

int take_coded(Exchange *self, PyObject *given)
{
    PyObject *region, *pieces;
    self->pushed = self->nbytes;
    if (given == Py_None)
        return 1;
    if (!PyTuple_Check(given) || !PyArg_ParseTuple(given, "OO!", &region, &PyTuple_Type, &pieces) ||
        PyObject_GetBuffer(region, &self->region, PyBUF_WRITABLE) < 0)
        return 0;
    Py_ssize_t count = PyTuple_Size(pieces);
    if (count <= 0 || count > PARTS || self->region.len > self->nbytes ||
        (self->pieces = PyMem_Calloc((size_t)count, sizeof *self->pieces)) == NULL)
        return 0;
    self->pushed = self->region.len;
    for (Py_ssize_t index = 0; index < count; index++) {
        self->piece_count++;
        if (!take_piece(self, PyTuple_GetItem(pieces, index), &self->pieces[index]))
            return 0;
    }
    return 1;
}
