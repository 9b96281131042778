/* Find where the fields of the table in fields.h lie. */

#include "fields.h"

Py_ssize_t field_places[FIELD_COUNT];
PyObject *field_classes[CLASS_COUNT];

#define OWNER(class, field) class##_class,
const int field_owners[FIELD_COUNT] = {FIELDS(OWNER)};
#define CLASS_NAME(class) #class,
static const char *const class_names[CLASS_COUNT] = {CLASSES(CLASS_NAME)};
#define FIELD_NAME(class, field) #field,
static const char *const field_names[FIELD_COUNT] = {FIELDS(FIELD_NAME)};

int is_of(PyObject *object, int class)
{
    PyTypeObject *type = (PyTypeObject *)field_classes[class];
    return type != NULL && (Py_TYPE(object) == type || PyType_IsSubtype(Py_TYPE(object), type));
}

/* Return where in an instance of a class, of `size` bytes, its field lies; -1: an error is set. */
static Py_ssize_t place_of(PyObject *instance, Py_ssize_t size, const char *name)
{
    Py_ssize_t place = -1, found = 0;
    PyObject *mark = PyList_New(0);
    if (mark != NULL && PyObject_SetAttrString(instance, name, mark) == 0) {
        for (Py_ssize_t at = sizeof(PyObject); at + (Py_ssize_t)sizeof mark <= size;
             at += sizeof mark)
            if (*(PyObject **)((char *)instance + at) == mark)
                place = at, found++;
        if (found != 1)
            PyErr_Format(PyExc_LookupError, "%s is not in the __slots__ of its class", name);
        /* `PyObject_DelAttrString` is a function of 3.13's headers, which 3.11 and 3.12 lack. */
        if (PyObject_SetAttrString(instance, name, NULL) < 0)
            found = 0;
    }
    Py_XDECREF(mark);
    return found == 1 && !PyErr_Occurred() ? place : -1;
}

/* Learn the places of all fields of a class. */
static int learn_class(int class, PyObject *type)
{
    PyObject *basic = PyObject_GetAttrString(type, "__basicsize__");
    PyObject *object = basic == NULL ? NULL : PyObject_CallMethod(type, "__new__", "O", type);
    Py_ssize_t size = basic == NULL ? -1 : PyLong_AsSsize_t(basic);
    int sound = object != NULL && size > 0 && (PyObject *)Py_TYPE(object) == type;
    for (int index = 0; sound && index < FIELD_COUNT; index++)
        if (field_owners[index] == class)
            sound = (field_places[index] = place_of(object, size, field_names[index])) > 0;
    Py_XDECREF(basic);
    Py_XDECREF(object);
    if (!sound && !PyErr_Occurred())
        PyErr_Format(PyExc_LookupError, "%s has no instances of its own", class_names[class]);
    return sound ? 0 : -1;
}

static PyObject *learn_fields(PyObject *module, PyObject *classes)
{
    (void)module;
    for (int class = 0; class < CLASS_COUNT; class++) {
        if (!PyMapping_HasKeyString(classes, class_names[class]))
            continue; /* each room learns its own */
        PyObject *type = PyMapping_GetItemString(classes, class_names[class]);
        if (type == NULL)
            return NULL;
        if (!PyType_Check(type) || learn_class(class, type) < 0) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_TypeError, "a class is wanted");
            Py_DECREF(type);
            return NULL;
        }
        Py_XDECREF(field_classes[class]);
        field_classes[class] = type;
    }
    Py_RETURN_NONE;
}

static PyMethodDef function = {"learn_fields", learn_fields, METH_O, "See _core.pyi."};

int add_fields(PyObject *module)
{
    PyObject *made = PyCFunction_New(&function, NULL), *names = PyTuple_New(CLASS_COUNT);
    for (int index = 0; names != NULL && index < CLASS_COUNT; index++)
        PyTuple_SetItem(names, index, PyUnicode_FromString(class_names[index]));
    int done = made == NULL || names == NULL ? -1
               : PyModule_AddObjectRef(module, "learn_fields", made) < 0
                   ? -1
                   : PyModule_AddObjectRef(module, "CLASSES", names);
    Py_XDECREF(made);
    Py_XDECREF(names);
    return done;
}
