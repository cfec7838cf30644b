/* cuGetProcAddress: the driver's functions by their plain names, the version chosen by what the program was
 * built for. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "process.h"

/* The library itself, also where it was loaded with RTLD_LOCAL. */
static void *own_handle(void)
{
    Dl_info info;
    if (!dladdr((void *)&own_handle, &info))
        return NULL;
    return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
}

static void *find(void *library, const char *symbol, int version)
{
    char name[128];
    void *found = NULL;
    /* The one function here whose newest version has other arguments. */
    if (strcmp(symbol, "cuCtxCreate") == 0 && version >= 13000)
        return dlsym(library, "cuCtxCreate_v4");
    if (strcmp(symbol, "cuGetProcAddress") == 0 && version < 12000)
        return dlsym(library, "cuGetProcAddress");
    snprintf(name, sizeof(name), "%s_v2", symbol);
    found = dlsym(library, name);
    return found ? found : dlsym(library, symbol);
}

EXPORT CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags,
                                    int *status)
{
    (void)flags;
    if (!symbol || !function)
        return CUDA_ERROR_INVALID_VALUE;
    void *library = own_handle();
    *function = library && strncmp(symbol, "cu", 2) == 0 ? find(library, symbol, version) : NULL;
    if (library)
        dlclose(library);
    if (status)
        *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

EXPORT CUresult cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags)
{
    return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}
