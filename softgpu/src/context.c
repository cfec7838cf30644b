/* Contexts: the primary one of each device, counted, and those that a program makes for itself. */
#define _GNU_SOURCE
#include <stdlib.h>

#include "process.h"

#define STACK_MAX 32

static __thread struct {
    struct context *entries[STACK_MAX];
    int depth; /* the current context is entries[depth - 1] */
} stack;

static bool alive(const struct context *context)
{
    for (struct context *c = process.contexts; c; c = c->next)
        if (c == context)
            return true;
    return false;
}

static struct context *top(void) { return stack.depth ? stack.entries[stack.depth - 1] : NULL; }

CUresult context_current(struct context **context)
{
    *context = top();
    return *context && alive(*context) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

static CUresult push(struct context *context)
{
    if (stack.depth == STACK_MAX)
        return CUDA_ERROR_OUT_OF_MEMORY;
    stack.entries[stack.depth++] = context;
    return CUDA_SUCCESS;
}

/* The first context of a process on a GPU makes it a client of that GPU. */
static CUresult create(int visible, bool primary, struct context **context)
{
    struct device *device = &process.visible[visible];
    int error = device->contexts
                    ? store_resize(&device->client, &device->gpu, device->client.used + CONTEXT_BYTES)
                    : store_attach(&device->client, &device->gpu, CONTEXT_BYTES);
    if (error)
        return result_of_errno(error);
    struct context *made = malloc(sizeof(*made));
    if (!made)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *made = (struct context){process.contexts, visible, 1, primary};
    process.contexts = made;
    device->contexts++;
    *context = made;
    return CUDA_SUCCESS;
}

static void destroy(struct context *context)
{
    struct device *device = &process.visible[context->visible];
    for (struct context **at = &process.contexts; *at; at = &(*at)->next)
        if (*at == context) {
            *at = context->next;
            break;
        }
    memory_free_context(context);
    if (--device->contexts == 0)
        store_detach(&device->client);
    else
        store_resize(&device->client, &device->gpu, device->client.used - CONTEXT_BYTES);
    free(context);
}

static struct context *primary_of(int visible)
{
    for (struct context *c = process.contexts; c; c = c->next)
        if (c->primary && c->visible == visible)
            return c;
    return NULL;
}

static bool valid(CUdevice ordinal) { return ordinal >= 0 && ordinal < process.ordinal_count; }

static CUresult retain(CUcontext *context, CUdevice ordinal)
{
    if (!context)
        return CUDA_ERROR_INVALID_VALUE;
    if (!valid(ordinal))
        return CUDA_ERROR_INVALID_DEVICE;
    *context = primary_of(process.ordinals[ordinal]);
    if (!*context)
        return create(process.ordinals[ordinal], true, context);
    (*context)->references++;
    return CUDA_SUCCESS;
}

static CUresult drop(CUdevice ordinal, bool all)
{
    if (!valid(ordinal))
        return CUDA_ERROR_INVALID_DEVICE;
    struct context *context = primary_of(process.ordinals[ordinal]);
    if (!context)
        return all ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
    if (all || --context->references == 0)
        destroy(context);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    GUARDED(retain(context, device));
}
EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) { GUARDED(drop(device, false)); }
EXPORT CUresult cuDevicePrimaryCtxRelease(CUdevice device) { GUARDED(drop(device, false)); }
EXPORT CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) { GUARDED(drop(device, true)); }

EXPORT CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned int flags)
{
    (void)flags;
    GUARDED(valid(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE);
}

static CUresult primary_state(CUdevice device, unsigned int *flags, int *active)
{
    if (!valid(device) || !flags || !active)
        return CUDA_ERROR_INVALID_VALUE;
    *flags = 0;
    *active = primary_of(process.ordinals[device]) != NULL;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active)
{
    GUARDED(primary_state(device, flags, active));
}

static CUresult create_and_push(CUcontext *context, CUdevice device)
{
    if (!context || !valid(device))
        return context ? CUDA_ERROR_INVALID_DEVICE : CUDA_ERROR_INVALID_VALUE;
    CUresult result = create(process.ordinals[device], false, context);
    return result == CUDA_SUCCESS ? push(*context) : result;
}

EXPORT CUresult cuCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device)
{
    (void)flags;
    GUARDED(create_and_push(context, device));
}

EXPORT CUresult cuCtxCreate_v4(CUcontext *context, void *params, unsigned int flags, CUdevice device)
{
    (void)flags;
    GUARDED(params ? CUDA_ERROR_NOT_SUPPORTED : create_and_push(context, device));
}

static CUresult destroy_own(CUcontext context)
{
    if (!alive(context) || context->primary)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (top() == context)
        stack.depth--;
    destroy(context);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxDestroy_v2(CUcontext context) { GUARDED(destroy_own(context)); }

static CUresult set_current(CUcontext context)
{
    if (context && !alive(context))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (stack.depth)
        stack.depth--;
    return context ? push(context) : CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetCurrent(CUcontext context) { GUARDED(set_current(context)); }
EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context)
{
    GUARDED(alive(context) ? push(context) : CUDA_ERROR_INVALID_CONTEXT);
}

static CUresult pop(CUcontext *context)
{
    if (!stack.depth)
        return CUDA_ERROR_INVALID_CONTEXT;
    stack.depth--;
    if (context)
        *context = stack.entries[stack.depth];
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *context) { GUARDED(pop(context)); }

EXPORT CUresult cuCtxGetCurrent(CUcontext *context)
{
    GUARDED(context ? (*context = top(), CUDA_SUCCESS) : CUDA_ERROR_INVALID_VALUE);
}

static CUresult current_device(CUdevice *device)
{
    struct context *context;
    CUresult result = device ? context_current(&context) : CUDA_ERROR_INVALID_VALUE;
    for (int i = 0; result == CUDA_SUCCESS && i < process.ordinal_count; i++)
        if (process.ordinals[i] == context->visible)
            *device = i;
    return result;
}

EXPORT CUresult cuCtxGetDevice(CUdevice *device) { GUARDED(current_device(device)); }

static CUresult require_current(void)
{
    struct context *context;
    return context_current(&context);
}

EXPORT CUresult cuCtxSynchronize(void) { GUARDED(require_current()); }

static CUresult api_version(CUcontext context, unsigned int *version)
{
    if (!version || (context && !alive(context)))
        return version ? CUDA_ERROR_INVALID_CONTEXT : CUDA_ERROR_INVALID_VALUE;
    *version = 3020; /* what every context of cuCtxCreate_v2 answers */
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetApiVersion(CUcontext context, unsigned int *version)
{
    GUARDED(api_version(context, version));
}
