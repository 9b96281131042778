/* The answers of a client's exchanges: their forms, and the increments of coded ones.
 *
 * `aiops/client/coded_answer.py` is the specification. An exchange of raw parameters has one form. One
 * of a client that fetches coded has a form for each number of increments, which are all received
 * beside the parameters, and added if all of them are sound. The interpreter's lock is not needed.
 */

#include "exchange.h"
#include <math.h>

#define PREFIX 5 /* bytes before a payload: aiops.wire.template.PREFIX */
#define BINARY 0xc6

static double read_float(const unsigned char *at, Py_ssize_t width)
{
    union { uint64_t bits; double value; } wide = {.bits = read_number(at, width)};
    union { uint32_t bits; float value; } narrow = {.bits = (uint32_t)wide.bits};
    return width == 8 ? wide.value : (double)narrow.value;
}

/* Return whether the header in `room` is the answer to a push: `SteadyExchange._permits`. */
int matches(const Exchange *self, const Ack *ack, uint64_t id)
{
    const unsigned char *head = self->room.buf, *form = ack->head.buf, *varies = ack->varies.buf;
    int differs = 0;
    for (Py_ssize_t at = 0; at < ack->head.len; at++) /* no branch: so it runs in vectors */
        differs |= (head[at] ^ form[at]) & ~varies[at];
    if (differs)
        return 0;
    for (Py_ssize_t index = 0; index < ack->slot_count; index++) {
        const Slot *slot = &ack->slots[index];
        const unsigned char *at = head + slot->begin;
        if (index < VERSIONS) {
            uint64_t number = read_number(at, slot->width);
            if (index == 0 ? number != id : number > LARGEST)
                return 0;
        } else if (slot->kind == 'f' && !isfinite(read_float(at, slot->width)))
            return 0;
    }
    for (Py_ssize_t index = 0; index < ack->age_count; index++)
        if (read_number(head + ack->ages[index], 8) !=
            read_number(head + ack->slots[AGE].begin, ack->slots[AGE].width))
            return 0;
    return 1;
}

int find_form(Exchange *self, uint64_t id)
{
    for (Py_ssize_t index = 0; index < self->ack_count; index++) {
        const Ack *ack = &self->acks[index];
        if (self->received >= ack->head.len && self->received <= ack->head.len + ack->nbytes &&
            matches(self, ack, id)) {
            self->found = ack;
            return 1;
        }
    }
    return 0;
}

PyObject *values(const Exchange *self)
{
    const Ack *ack = self->found;
    PyObject *found = PyTuple_New(ack->slot_count + self->increments);
    for (Py_ssize_t index = 0; found != NULL && index < ack->slot_count; index++) {
        const Slot *slot = &ack->slots[index];
        const unsigned char *at = (const unsigned char *)self->room.buf + slot->begin;
        PyObject *value =
            slot->kind == 'u'   ? PyLong_FromUnsignedLongLong(read_number(at, slot->width))
            : slot->kind == 'f' ? PyFloat_FromDouble(read_float(at, slot->width))
            : slot->kind == 'n' ? Py_NewRef(Py_None)
                                : PyBytes_FromStringAndSize((const char *)at, slot->width);
        if (value == NULL || PyTuple_SetItem(found, index, value) < 0)
            Py_CLEAR(found);
    }
    if (found != NULL && self->increments) {
        PyObject *number = PyLong_FromSsize_t(ack - self->acks);
        if (number == NULL || PyTuple_SetItem(found, ack->slot_count, number) < 0)
            Py_CLEAR(found);
    }
    return found;
}

int apply_increments(Exchange *self, unsigned char *target)
{
    const Ack *ack = self->found;
    const unsigned char *region = (const unsigned char *)self->room.buf + ack->head.len;
    for (Py_ssize_t index = 0; index < ack->piece_count; index++) {
        const AnswerPiece *piece = &ack->pieces[index];
        const unsigned char *at = region + piece->begin;
        if (at[-PREFIX] != BINARY || /* the first one's is the end of the header */
            read_number(at - PREFIX + 1, PREFIX - 1) != (uint64_t)piece->nbytes)
            return 0;
        if (piece->check != NULL &&
            !piece->check((piece->stop - piece->start) / 4, at, at + piece->second))
            return 0;
    }
    for (Py_ssize_t index = 0; index < ack->piece_count; index++) {
        const AnswerPiece *piece = &ack->pieces[index];
        const unsigned char *at = region + piece->begin;
        if (piece->check == NULL)
            memcpy(target + piece->start, at, (size_t)piece->nbytes);
        else
            piece->add((piece->stop - piece->start) / 4, at, at + piece->second,
                       target + piece->start);
    }
    self->placed = 1;
    return 1;
}

void forget_acks(Exchange *self)
{
    for (Py_ssize_t index = 0; index < self->ack_count; index++) {
        PyBuffer_Release(&self->acks[index].head);
        PyBuffer_Release(&self->acks[index].varies);
        PyMem_Free(self->acks[index].ages);
        PyMem_Free(self->acks[index].pieces);
    }
    PyMem_Free(self->acks);
}

/* Take note of a value of an answer; return whether it lies in the header, and has a known kind. */
static int take_slot(Ack *ack, Py_ssize_t index, PyObject *given)
{
    Slot *slot = &ack->slots[index];
    if (!PyTuple_Check(given) ||
        !PyArg_ParseTuple(given, "nnC", &slot->begin, &slot->width, &slot->kind))
        return 0;
    Py_ssize_t width = slot->width;
    int wide = width == 4 || width == 8;
    int known = slot->kind == 'u'   ? wide || width == 1 || width == 2
                : slot->kind == 'f' ? wide && index >= VERSIONS
                : slot->kind == 'n' ? width == 0 && index == AGE
                                    : slot->kind == 's' && width >= 0 && index > VERSIONS;
    return known && slot->begin >= 0 && width <= ack->head.len &&
           slot->begin <= ack->head.len - width;
}

/* Take note of where the version of the tensors stands again; return whether that is in the header. */
static int take_ages(Ack *ack, PyObject *given)
{
    Py_ssize_t count = PyTuple_Size(given);
    if (count >= PARTS ||
        (ack->ages = PyMem_Calloc((size_t)count + 1, sizeof *ack->ages)) == NULL)
        return 0;
    ack->age_count = count;
    for (Py_ssize_t index = 0; index < count; index++) {
        Py_ssize_t at = ack->ages[index] = PyLong_AsSsize_t(PyTuple_GetItem(given, index));
        if (at < 0 || at > ack->head.len - 8)
            return 0;
    }
    return 1;
}

/* Take a payload that begins behind so many bytes of the region; return whether it is for the model. */
static int take_piece(const Exchange *self, AnswerPiece *piece, Py_ssize_t behind, PyObject *given)
{
    PyObject *check, *add;
    if (!PyTuple_Check(given) ||
        !PyArg_ParseTuple(given, "OOnnnnn", &check, &add, &piece->start, &piece->stop,
                          &piece->begin, &piece->nbytes, &piece->second))
        return 0;
    piece->check = (Check)(uintptr_t)PyLong_AsVoidPtr(check);
    piece->add = PyErr_Occurred() ? NULL : (Add)(uintptr_t)PyLong_AsVoidPtr(add);
    if (PyErr_Occurred() || piece->start < 0 || piece->start >= piece->stop ||
        piece->stop > self->nbytes || piece->begin != behind || piece->nbytes <= 0 ||
        piece->nbytes > MOST_BYTES || (piece->check == NULL) != (piece->add == NULL))
        return 0;
    Py_ssize_t size = piece->stop - piece->start;
    return piece->check == NULL ? piece->nbytes == size
                                : size % 4 == 0 && piece->second >= 0 &&
                                      piece->second <= piece->nbytes;
}

/* Take the payloads, which fill the region. */
static int take_pieces(const Exchange *self, Ack *ack, PyObject *given)
{
    Py_ssize_t count = PyTuple_Check(given) ? PyTuple_Size(given) : -1, behind = 0;
    if (count < 0 || count > PARTS ||
        (ack->pieces = PyMem_Calloc((size_t)count + 1, sizeof *ack->pieces)) == NULL)
        return 0;
    ack->piece_count = count;
    for (Py_ssize_t index = 0; index < count; index++) {
        AnswerPiece *piece = &ack->pieces[index];
        if (!take_piece(self, piece, behind + (index ? PREFIX : 0), PyTuple_GetItem(given, index)))
            return 0;
        behind = piece->begin + piece->nbytes;
    }
    return behind == ack->nbytes;
}

/* Take a form; return whether answers of it fit into the room. */
static int take_ack(Exchange *self, Ack *ack, PyObject *given)
{
    PyObject *slots, *ages, *pieces;
    if (!PyTuple_Check(given) ||
        !PyArg_ParseTuple(given, "y*y*O!O!nO", &ack->head, &ack->varies, &PyTuple_Type, &slots,
                          &PyTuple_Type, &ages, &ack->nbytes, &pieces))
        return 0;
    ack->slot_count = PyTuple_Size(slots);
    if (ack->slot_count <= VERSIONS || ack->slot_count > SLOTS || ack->head.len < PREFIX ||
        ack->varies.len != ack->head.len || !take_ages(ack, ages))
        return 0;
    for (Py_ssize_t index = 0; index < ack->slot_count; index++)
        if (!take_slot(ack, index, PyTuple_GetItem(slots, index)))
            return 0;
    Py_ssize_t beside = self->room.len - ack->head.len; /* bytes behind the header in `room` */
    if (pieces == Py_None) /* the model; there are no other forms */
        return ack->nbytes == self->nbytes && self->ack_count == 1 && ack->age_count == 0 &&
               (beside == 0 || beside == self->nbytes);
    self->increments = 1;
    return take_pieces(self, ack, pieces) && beside >= ack->nbytes;
}

int take_acks(Exchange *self, PyObject *given)
{
    Py_ssize_t count = PyTuple_Size(given);
    if (count <= 0 || count > ACKS ||
        (self->acks = PyMem_Calloc((size_t)count, sizeof *self->acks)) == NULL)
        return 0;
    self->found = self->acks;
    self->ack_count = count;
    for (Py_ssize_t index = 0; index < count; index++)
        if (!take_ack(self, &self->acks[index], PyTuple_GetItem(given, index)))
            return 0;
    return 1;
}
