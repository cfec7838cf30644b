/*
 * The setting `runtime`, read from the settings file only where it is written plainly.
 *
 * Plainly: before the first [table] there are only blank lines, comments and lines of a bare key and a boolean, a
 * number, or a string in one pair of quotes without an escape. Anything else may be TOML, or nothing at all, and
 * Python's tomllib decides.
 */
#ifndef GPUSNAP_SETTINGS_H
#define GPUSNAP_SETTINGS_H

#include "kernel.h"
#include "lookup.h"
#include "text.h"

#define SETTINGS_SIZE 16384

enum setting { SETTING_ABSENT, SETTING_FOUND, SETTING_UNCERTAIN };

static const char *skip_blanks(const char *at)
{
    while (*at == ' ' || *at == '\t')
        at++;
    return at;
}

static int is_bare(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-';
}

/* Past blanks, a comment and the line's end; NULL when there is something else on the line. */
static const char *end_of_line(const char *at)
{
    at = skip_blanks(at);
    if (*at == '#')
        while (*at != '\n' && *at != '\0') {
            if ((unsigned char)*at < ' ' && *at != '\t' && !(*at == '\r' && at[1] == '\n'))
                return NULL;
            at++;
        }
    if (*at == '\r' && at[1] == '\n')
        at++;
    if (*at == '\n')
        return at + 1;
    return *at == '\0' ? at : NULL;
}

/* Past a string in one pair of quotes, its inside in *value and *length; NULL for any other kind of string. */
static const char *plain_string(const char *at, const char **value, size_t *length)
{
    const char quote = *at++;

    *value = at;
    for (; *at != quote; at++)
        if (*at == '\\' || (unsigned char)*at < ' ' || (unsigned char)*at > '~')
            return NULL;
    *length = (size_t)(at - *value);
    /* An empty string, or the start of a """multi-line one""". */
    return *length == 0 && at[1] == quote ? NULL : at + 1;
}

/* Past a boolean or a decimal number such as an administrator writes; NULL for any other word. */
static const char *plain_word(const char *at)
{
    const char *first;

    if (begins(at, "true"))
        return at + 4;
    if (begins(at, "false"))
        return at + 5;
    for (first = at; *at >= '0' && *at <= '9'; at++)
        if (at > first && *first == '0')
            return NULL;
    return at > first ? at : NULL;
}

static int keep_name(const char *value, size_t length, char *name, size_t size)
{
    /* A name, or an absolute path; Python refuses a relative one. */
    if (length == 0 || (value[0] != '/' && length_before(value, '/') < length))
        return 0;
    return put(name, size, 0, value, length);
}

static enum setting runtime_in(const char *at, char *name, size_t size)
{
    enum setting found = SETTING_ABSENT;

    for (;;) {
        const char *key, *value = NULL;
        size_t key_length, length = 0;

        at = skip_blanks(at);
        if (*at == '\0' || *at == '[')
            return found;
        if (*at == '#' || *at == '\r' || *at == '\n') {
            if ((at = end_of_line(at)) == NULL)
                return SETTING_UNCERTAIN;
            continue;
        }
        for (key = at; is_bare(*at); at++)
            ;
        key_length = (size_t)(at - key);
        at = skip_blanks(at);
        if (key_length == 0 || *at++ != '=')
            return SETTING_UNCERTAIN;
        at = skip_blanks(at);
        at = *at == '"' || *at == '\'' ? plain_string(at, &value, &length) : plain_word(at);
        if (at == NULL || (at = end_of_line(at)) == NULL)
            return SETTING_UNCERTAIN;
        if (key_length == 7 && begins(key, "runtime")) {
            if (found == SETTING_FOUND || value == NULL || !keep_name(value, length, name, size))
                return SETTING_UNCERTAIN;
            found = SETTING_FOUND;
        }
    }
}

/* The value of `runtime` in the file, in `name`. */
static enum setting runtime_setting(const char *file, char *name, size_t size)
{
    static char text[SETTINGS_SIZE];
    long fd = open_file(file), length;

    if (fd == -ENOENT)
        return SETTING_ABSENT;
    if (fd < 0)
        return SETTING_UNCERTAIN;
    length = read_block(fd, text, sizeof(text));
    close_file(fd);
    if (length < 0 || length == sizeof(text))
        return SETTING_UNCERTAIN;
    text[length] = '\0';
    if (length_before(text, '\0') != (size_t)length)
        return SETTING_UNCERTAIN;
    return runtime_in(text, name, size);
}

#endif
