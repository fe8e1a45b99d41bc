/* A server that answers lines in capitals: one handle per thread, one message per read.
 *
 *   cc -pthread -o mux mux.c -ltowpath && ./mux 127.0.0.1:7007 */
#define _GNU_SOURCE
#include <ctype.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/socket.h>

#include <towpath.h>

enum { THREADS = 4 };

static void *serve(void *handle)
{
    towpath_mux *mux = handle;
    char line[65536];
    int length;
    /* Any free thread gets the message; the answer goes to its connection. */
    while ((length = towpath_mux_recv(mux, line, sizeof line, 0, NULL)) > 0) {
        for (int i = 0; i < length; i++)
            line[i] = (char)toupper((unsigned char)line[i]);
        int sent = towpath_mux_send(mux, NULL, line, (size_t)length, 0);
        if (sent < 0 && sent != -EPIPE) /* this connection has ended, others have not */
            break;
    }
    if (length != -ESHUTDOWN)
        fprintf(stderr, "mux: %s\n", towpath_error());
    towpath_mux_close(mux, 10000);
    return NULL;
}

int main(int argc, char **argv)
{
    towpath_mux *handles[THREADS];
    pthread_t threads[THREADS];
    uint16_t port;
    if (argc != 2) {
        fprintf(stderr, "usage: mux ADDRESS:PORT\n");
        return 2;
    }
    int made = towpath_mux_socket(SOCK_DGRAM, "line", 0, &handles[0]);
    for (int i = 1; i < THREADS && made == 0; i++)
        made = towpath_mux_clone(handles[0], &handles[i]);
    if (made < 0 || towpath_mux_listen(handles[0], argv[1], &port) < 0) {
        fprintf(stderr, "mux: %s\n", towpath_error());
        return 1;
    }
    printf("port %u\n", port);
    fflush(stdout);
    for (int i = 0; i < THREADS; i++)
        pthread_create(&threads[i], NULL, serve, handles[i]);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    return 0;
}
