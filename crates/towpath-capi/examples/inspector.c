/* An inspector that drops every packet whose payload contains a word. A template for other inspectors.
 *
 *   cc -o inspector inspector.c -ltowpath
 *   towpath replay capture.pcap --rules rules.ipfw --queue 1="./inspector password" */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>

#include <towpath.h>

int main(int argc, char **argv)
{
    if (argc != 2 || !*argv[1]) {
        fprintf(stderr, "usage: inspector WORD\n");
        return 2;
    }
    const char *word = argv[1];
    towpath_inspector *queue;
    /* Towpath starts this program and sets TOWPATH_SOCKET to the socket to attach to. */
    if (towpath_inspector_attach(NULL, NULL, 0, &queue) < 0) {
        fprintf(stderr, "inspector: %s\n", towpath_error());
        return 1;
    }

    /* Frames arrive in batches. The payload is read in place; the verdict returns the frame. */
    struct towpath_frame batch[64];
    unsigned long seen = 0, dropped = 0;
    int count;
    while ((count = towpath_inspector_recv_batch(queue, batch, 64, -1)) > 0) {
        for (int i = 0; i < count; i++) {
            const struct towpath_frame *frame = &batch[i];
            int found = memmem(frame->payload, frame->len, word, strlen(word)) != NULL;
            seen++;
            dropped += found;
            towpath_inspector_verdict(queue, frame, found ? TOWPATH_DROP : TOWPATH_PASS);
        }
    }
    if (count < 0)
        fprintf(stderr, "inspector: %s\n", towpath_error());
    fprintf(stderr, "inspector: %lu packets, %lu dropped\n", seen, dropped);
    towpath_inspector_close(queue);
    return count < 0;
}
