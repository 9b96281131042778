/* The module `aiops.compiled._core`, made of the types of the other files. */

#include "core.h"
#include <time.h>

#define TEXT(name) #name,
static const char *const texts[NAME_COUNT] = {NAMES(TEXT)};
PyObject *names[NAME_COUNT];

long long now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static int add_names(void)
{
    for (int index = 0; index < NAME_COUNT; index++)
        if ((names[index] = PyUnicode_InternFromString(texts[index])) == NULL)
            return -1;
    return 0;
}

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "_core", .m_size = -1};

PyMODINIT_FUNC PyInit__core(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && add_names() == 0 && add_exchange(module) == 0 &&
        add_fields(module) == 0 && add_answers(module) == 0 && add_kernel(module) == 0 &&
        add_crc(module) == 0 && add_increments(module) == 0 && add_poller(module) == 0 &&
        add_mailboxes(module) == 0 &&
        PyModule_AddStringConstant(module, "SOURCE", SOURCE) == 0) /* the digest of all files */
        return module;
    Py_XDECREF(module);
    return NULL;
}
