/* Numbers of 2 and 4 bytes as planes: all their lowest bytes, then all of the next ones, and the highest apart.
 * No C library: see Makefile. The caller has checked every size (oci/chunks/planes.py). */
#include <stddef.h>

typedef unsigned char byte;

void split(const byte *restrict plain, byte *restrict low, byte *restrict top, size_t count, size_t width)
{
    if (width == 2)
        for (size_t i = 0; i < count; i++) {
            low[i] = plain[2 * i];
            top[i] = plain[2 * i + 1];
        }
    else
        for (size_t i = 0; i < count; i++) {
            low[i] = plain[4 * i];
            low[count + i] = plain[4 * i + 1];
            low[2 * count + i] = plain[4 * i + 2];
            top[i] = plain[4 * i + 3];
        }
}

void join(byte *restrict plain, const byte *restrict low, const byte *restrict top, size_t count, size_t width)
{
    if (width == 2)
        for (size_t i = 0; i < count; i++) {
            plain[2 * i] = low[i];
            plain[2 * i + 1] = top[i];
        }
    else
        for (size_t i = 0; i < count; i++) {
            plain[4 * i] = low[i];
            plain[4 * i + 1] = low[count + i];
            plain[4 * i + 2] = low[2 * count + i];
            plain[4 * i + 3] = top[i];
        }
}
