/* A worker's exchange that is like the one before: `aiops.client.steady.SteadyExchange.carry`.
 *
 * That is the specification. What it finds out of parameters and gradients is decided here only if
 * they are those of the last exchange, as it left them; else `carry` says that it has done nothing.
 */

#include "exchange.h"
#include "fields.h"

/* Return what of the gradients is sent, borrowed; NULL: they are none that are sent here. */
static PyObject *pushed(PyObject *steady, PyObject *gradients)
{
    if (PyDict_CheckExact(gradients))
        return gradients;
    if ((PyObject *)Py_TYPE(gradients) != field_classes[Params_class] ||
        get(gradients, Params_layout) != get(steady, SteadyExchange__layout) ||
        !is_of(get(gradients, Params_arena), Arena_class))
        return NULL;
    return get(get(gradients, Params_arena), Arena_data);
}

/* Return whether parameters are as the last exchange left them, and this one may be as that was. */
static int is_usual(PyObject *object, PyObject *steady, PyObject *params)
{
    long long count;
    return !((Exchange *)object)->increments && is_of(steady, SteadyExchange_class) && get(steady, SteadyExchange__usual) == params &&
           (PyObject *)Py_TYPE(params) == field_classes[Params_class] &&
           get(params, Params_connection) == get(steady, SteadyExchange__connection) &&
           get(params, Params_level) == get(steady, SteadyExchange__have) &&
           get(params, Params_age) == get(steady, SteadyExchange__age) &&
           is_of(get(params, Params_arena), Arena_class) &&
           get(steady, SteadyExchange_direct) == Py_False &&
           get(steady, SteadyExchange__has_vbar) == Py_False &&
           read_integer(get(steady, SteadyExchange_unsettled), &count) && count > 0;
}

/* Return a receipt, as `Receipt` makes it; the arguments are the caller's. */
static PyObject *receipt_of(PyObject *version, PyObject *staleness, PyObject *mean)
{
    PyTypeObject *type = (PyTypeObject *)field_classes[Receipt_class];
    PyObject *made = ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (made == NULL)
        return NULL;
    if (put(made, Receipt_vbars, PyDict_New()) < 0 ||
        put(made, Receipt_why, PyUnicode_FromStringAndSize(NULL, 0)) < 0 ||
        put(made, Receipt_version, Py_NewRef(version)) < 0 ||
        put(made, Receipt_staleness, Py_NewRef(staleness)) < 0 ||
        put(made, Receipt_mean_staleness, Py_NewRef(mean)) < 0 ||
        put(made, Receipt_vbar, Py_NewRef(Py_None)) < 0 ||
        put(made, Receipt_used, Py_NewRef(Py_True)) < 0 ||
        put(made, Receipt_pushed, Py_NewRef(Py_True)) < 0)
        Py_CLEAR(made);
    return made;
}

/* Take note of an answer: (id, version, current, age, staleness, mean). */
static PyObject *taken(PyObject *steady, PyObject *params, PyObject *found)
{
    PyObject *current = PyTuple_GetItem(found, 2), *age = PyTuple_GetItem(found, 3);
    PyObject *one = PyLong_FromLong(1), *made = NULL;
    if (current != NULL && age != NULL && one != NULL && PyTuple_Size(found) == 6 &&
        put(params, Params_level, Py_NewRef(current)) == 0 &&
        put(steady, SteadyExchange__have, Py_NewRef(current)) == 0 &&
        put(params, Params_age, Py_NewRef(age)) == 0 &&
        put(steady, SteadyExchange__age, Py_NewRef(age)) == 0 &&
        put(steady, SteadyExchange__params, Py_NewRef(Py_None)) == 0 &&
        add(steady, SteadyExchange_unsettled, one) == 0)
        made = receipt_of(PyTuple_GetItem(found, 1), PyTuple_GetItem(found, 4),
                          PyTuple_GetItem(found, 5));
    else if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "an answer without statistics has six values");
    Py_XDECREF(one);
    return made;
}

/* The numbers of an exchange: the last ones, and its own. */
typedef struct {
    PyObject *before[2], *own[2];
} Numbers;

/* Number an exchange, and take note of what it pushes, as `SteadyExchange._next` does. 0: an error. */
static int begin(PyObject *steady, PyObject *params, PyObject *gradients, Numbers *numbers)
{
    PyObject *one = PyLong_FromLong(1);
    numbers->before[0] = Py_NewRef(get(steady, SteadyExchange__id));
    numbers->before[1] = Py_NewRef(get(steady, SteadyExchange__seq));
    numbers->own[0] = one == NULL ? NULL : PyNumber_Add(numbers->before[0], one);
    numbers->own[1] = numbers->own[0] == NULL ? NULL : PyNumber_Add(numbers->before[1], one);
    Py_XDECREF(one);
    return numbers->own[1] != NULL &&
           put(steady, SteadyExchange__id, Py_NewRef(numbers->own[0])) == 0 &&
           put(steady, SteadyExchange__seq, Py_NewRef(numbers->own[1])) == 0 &&
           put(steady, SteadyExchange__params, Py_NewRef(params)) == 0 &&
           put(steady, SteadyExchange__gradients, Py_NewRef(gradients)) == 0;
}

/* Let go of the numbers; of an exchange of which nothing has been sent, take them back. */
static void settle(PyObject *steady, Numbers *numbers, int sent)
{
    if (!sent) {
        put(steady, SteadyExchange__id, Py_NewRef(numbers->before[0]));
        put(steady, SteadyExchange__seq, Py_NewRef(numbers->before[1]));
        put(steady, SteadyExchange__params, Py_NewRef(Py_None));
    }
    for (int index = 0; index < 2; index++) {
        Py_DECREF(numbers->before[index]);
        Py_XDECREF(numbers->own[index]);
    }
}

PyObject *carry(PyObject *object, PyObject *const *given, Py_ssize_t count)
{
    PyObject *steady, *params, *gradient, *found = NULL;
    Numbers numbers;
    if (count != 4) {
        PyErr_SetString(PyExc_TypeError, "carry takes a steady exchange and its 3 arguments");
        return NULL;
    }
    steady = given[0];
    params = given[1];
    if (!is_usual(object, steady, params) || (gradient = pushed(steady, given[2])) == NULL)
        return Py_NewRef(Py_NotImplemented);
    if (begin(steady, params, given[2], &numbers)) {
        PyObject *target = Py_NewRef(get(get(params, Params_arena), Arena_data));
        PyObject *have = Py_NewRef(get(steady, SteadyExchange__have));
        PyObject *age = Py_NewRef(get(steady, SteadyExchange__age));
        PyObject *pieces[] = {gradient, target, numbers.own[0], numbers.own[1], have, age, given[3]};
        Py_INCREF(gradient);
        found = run(object, pieces, 7);
        Py_DECREF(gradient);
        Py_DECREF(target);
        Py_DECREF(have);
        Py_DECREF(age);
    }
    settle(steady, &numbers, found != Py_False);
    PyObject *made = found == NULL ? NULL
                     : PyTuple_Check(found)
                         ? taken(steady, params, found)
                         : Py_NewRef(Py_None);
    Py_XDECREF(found);
    return made;
}

PyObject *push_usual(PyObject *object, PyObject *const *given, Py_ssize_t count)
{
    PyObject *steady, *gradient, *found = NULL;
    Numbers numbers;
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "push_usual takes a steady exchange and its 2 arguments");
        return NULL;
    }
    steady = given[0];
    if (!is_usual(object, steady, given[1]) || (gradient = pushed(steady, given[2])) == NULL)
        return Py_NewRef(Py_NotImplemented);
    if (begin(steady, given[1], given[2], &numbers)) {
        PyObject *have = Py_NewRef(get(steady, SteadyExchange__have));
        PyObject *age = Py_NewRef(get(steady, SteadyExchange__age));
        PyObject *pieces[] = {gradient, numbers.own[0], numbers.own[1], have, age};
        Py_INCREF(gradient);
        found = push(object, pieces, 5);
        Py_DECREF(gradient);
        Py_DECREF(have);
        Py_DECREF(age);
    }
    settle(steady, &numbers, found != Py_False);
    return found;
}

PyObject *pull_usual(PyObject *object, PyObject *const *given, Py_ssize_t count)
{
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "pull_usual takes a steady exchange and its 2 arguments");
        return NULL;
    }
    PyObject *steady = given[0];
    PyObject *params = is_of(steady, SteadyExchange_class) ? get(steady, SteadyExchange__params)
                                                          : Py_None;
    if (!is_usual(object, steady, params))
        return Py_NewRef(Py_NotImplemented);
    Py_INCREF(params);
    PyObject *target = Py_NewRef(get(get(params, Params_arena), Arena_data));
    PyObject *id = Py_NewRef(get(steady, SteadyExchange__id));
    PyObject *pieces[] = {target, id, given[1], given[2]};
    PyObject *found = pull(object, pieces, 4);
    if (found != NULL && PyTuple_Check(found)) {
        PyObject *made = taken(steady, params, found);
        Py_DECREF(found);
        found = made;
    }
    Py_DECREF(params);
    Py_DECREF(target);
    Py_DECREF(id);
    return found;
}
