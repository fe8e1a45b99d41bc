/* A worker of towpath mux that answers each line in capitals. A template for other workers.
 *
 *   cc -o worker worker.c -ltowpath
 *   towpath mux 127.0.0.1:7007 --framing line --workers 4 --worker ./worker */
#include <ctype.h>
#include <stdio.h>

#include <towpath.h>

/* If this process dies while it has a message, another worker gets the message. */
static void capitals(const struct towpath_message *message, towpath_reply *reply, void *context)
{
    (void)context;
    for (size_t i = 0; i < message->len; i++) {
        char letter = (char)toupper(message->bytes[i]);
        towpath_reply_append(reply, &letter, 1);
    }
}

int main(void)
{
    towpath_worker *worker;
    /* Towpath starts this program and sets TOWPATH_SOCKET to the socket to attach to. */
    if (towpath_worker_attach(NULL, NULL, &worker) < 0) {
        fprintf(stderr, "worker: %s\n", towpath_error());
        return 1;
    }
    int ended = towpath_worker_serve(worker, 16, capitals, NULL);
    if (ended < 0)
        fprintf(stderr, "worker: %s\n", towpath_error());
    towpath_worker_close(worker);
    return ended < 0;
}
