/* What the tables of connections share: `links.h`. */

#include "links.h"

int lacks(PyObject *object, int which)
{
    int found = is_true(get(object, which));
    if (found < 0)
        PyErr_Clear();
    return found == 0;
}

int tell(PyObject *object, const char *method, PyObject *argument, PyObject *other)
{
    PyObject *name = PyUnicode_FromString(method), *found = NULL;
    if (name != NULL)
        found = PyObject_CallMethodObjArgs(object, name, argument, other, NULL);
    Py_XDECREF(name);
    Py_XDECREF(found);
    return found == NULL ? -1 : 0;
}

int broken(PyObject *link)
{
    PyObject *type, *error, *trace;
    if (!PyErr_ExceptionMatches(PyExc_Exception))
        return -1;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (trace != NULL)
        PyException_SetTraceback(error, trace);
    int done = tell(link, "broken", error, NULL);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(trace);
    return done;
}

PyObject *answers_of(PyObject *shortcut)
{
    PyObject *found = PyObject_GetAttrString(shortcut, "__self__");
    if (found == NULL)
        PyErr_Clear();
    else if (!is_answers(found))
        Py_CLEAR(found);
    return found;
}

int takes_by(PyObject *link, PyObject *shortcut, const Answers *answers)
{
    PyObject *wire = get(link, MessageTransport_wire);
    return get(link, MessageTransport_shortcut) == shortcut && wire == answers->part[PART_wire] &&
           get(wire, Connection_expected) == answers->part[PART_template];
}

int find_push(PyObject *wire, long long *begin, long long *end)
{
    long long rest;
    if (!lacks(wire, Connection_missing) || get(wire, Connection__message) != Py_None ||
        !read_integer(get(wire, Connection__begin), begin) ||
        !read_integer(get(wire, Connection__end), end) ||
        !read_integer(get(wire, Connection__rest), &rest) || rest < 0)
        return 0;
    if (*begin == *end) { /* `Connection.next_buffer` */
        PyObject *first = Py_NewRef(get(wire, Connection__rest));
        put(wire, Connection__begin, Py_NewRef(first));
        put(wire, Connection__end, first);
        *begin = *end = rest;
    }
    return *begin == rest && *end >= rest;
}

int find_place(void **table, uint32_t *places, size_t size, uint32_t most, uint32_t *place)
{
    for (*place = 0; *place < *places; ++*place) {
        PyObject *link;
        memcpy(&link, (char *)*table + *place * size, sizeof link);
        if (link == NULL)
            return 1;
    }
    uint32_t more = *places ? 2 * *places : 8;
    void *made = more > most ? NULL : PyMem_Realloc(*table, more * size);
    if (made == NULL)
        return (PyErr_NoMemory(), 0);
    memset((char *)made + *places * size, 0, (more - *places) * size);
    *table = made;
    *places = more;
    return 1;
}
