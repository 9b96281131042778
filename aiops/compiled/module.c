/* The module `aiops.compiled._core`, made of the types of the other files. */

#include "core.h"

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "_core", .m_size = -1};

PyMODINIT_FUNC PyInit__core(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && add_exchange(module) == 0 && add_fields(module) == 0 &&
        add_answers(module) == 0 && add_poller(module) == 0 &&
        PyModule_AddStringConstant(module, "SOURCE", SOURCE) == 0) /* the digest of all files */
        return module;
    Py_XDECREF(module);
    return NULL;
}
