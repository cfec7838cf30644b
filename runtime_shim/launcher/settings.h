/*
 * The setting `runtime`, as written() in runtime/find.py reads it.
 *
 * It is the value of the first line `runtime = NAME` before the first [table], quoted or not, so that no mistake
 * elsewhere in the file can keep a command from the real runtime. Where TOML would read another value,
 * settings.py refuses the file.
 */
#ifndef GPUSNAP_SETTINGS_H
#define GPUSNAP_SETTINGS_H

#include "kernel.h"
#include "lookup.h"
#include "text.h"

#define SETTINGS_SIZE 65536 /* of a longer file the beginning; SETTINGS_SIZE in runtime/find.py */

enum setting { SETTING_ABSENT, SETTING_FOUND, SETTING_BAD, SETTING_UNREADABLE };

static int is_blank(char c)
{
    return c == ' ' || c == '\t';
}

static const char *skip_blanks(const char *at)
{
    while (is_blank(*at))
        at++;
    return at;
}

/* The start of the value of a line `runtime = VALUE`; NULL for another line. */
static const char *value_in(const char *at)
{
    const char quote = *at == '"' || *at == '\'' ? *at++ : '\0';

    if (!begins(at, "runtime"))
        return NULL;
    at += 7;
    if (quote != '\0' && *at++ != quote)
        return NULL;
    at = skip_blanks(at);
    return *at == '=' ? skip_blanks(at + 1) : NULL;
}

/* A name or an absolute path, up to its end quote, or without one to a blank, a comment or the line's end. */
static enum setting plain_value(const char *at, char *name, size_t size)
{
    const char quote = *at == '"' || *at == '\'' ? *at : '\0';
    size_t length = 0;

    while (quote != '\0' && *at == quote)
        at++;
    while (at[length] != '\n' && at[length] != '\0' &&
           (quote != '\0' ? at[length] != quote : !is_blank(at[length]) && at[length] != '#' && at[length] != '\r')) {
        if ((unsigned char)at[length] < ' ' || at[length] == '\\' || at[length] == 0x7f)
            return SETTING_BAD;
        length++;
    }
    if (length == 0)
        return SETTING_ABSENT;
    if (!put(name, size, 0, at, length) || (name[0] != '/' && length_before(name, '/') < length))
        return SETTING_BAD;
    return SETTING_FOUND;
}

static enum setting runtime_in(const char *at, char *name, size_t size)
{
    for (;;) {
        const char *value;

        at = skip_blanks(at);
        if (*at == '[' || *at == '\0')
            return SETTING_ABSENT;
        if ((value = value_in(at)) != NULL)
            return plain_value(value, name, size);
        at += length_before(at, '\n');
        at += *at == '\n';
    }
}

/* The value of `runtime` in the file, in `name`. */
static enum setting runtime_setting(const char *file, char *name, size_t size)
{
    static char text[SETTINGS_SIZE + 1];
    long fd = open_file(file), length;

    if (fd == -ENOENT)
        return SETTING_ABSENT;
    if (fd < 0)
        return SETTING_UNREADABLE;
    length = read_block(fd, text, SETTINGS_SIZE);
    close_file(fd);
    if (length < 0)
        return SETTING_UNREADABLE;
    text[length] = '\0';
    return runtime_in(text, name, size);
}

#endif
