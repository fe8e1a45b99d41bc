/* Prints all states and then each change of a state, as JSON, one object per line.
 *
 *   cc -o follow follow.c -ltowpath
 *   ./follow /run/towpath/ctl.sock.ring */
#include <stdio.h>
#include <string.h>

#include <towpath.h>

int main(int argc, char **argv)
{
    if (argc != 2) {
        fprintf(stderr, "usage: follow CONTROL_SOCKET.ring\n");
        return 2;
    }
    towpath_inspector *ring;
    if (towpath_inspector_attach(argv[1], "follow", 0, &ring) < 0) {
        fprintf(stderr, "follow: %s\n", towpath_error());
        return 1;
    }
    /* The events first: no state begins unnoticed between both answers. */
    if (towpath_inspector_request(ring, TOWPATH_GROUP_EVENTS, NULL, 0) < 0 ||
        towpath_inspector_request(ring, TOWPATH_GROUP_STATES, NULL, 0) < 0) {
        fprintf(stderr, "follow: %s\n", towpath_error());
        return 1;
    }
    struct towpath_frame frame;
    int got;
    while ((got = towpath_inspector_recv(ring, &frame, -1)) == 1) {
        switch (frame.kind) {
        case TOWPATH_DUMP:
        case TOWPATH_EVENT:
            fwrite(frame.payload, 1, frame.len, stdout);
            fflush(stdout);
            break;
        case TOWPATH_GAP:
            fprintf(stderr, "follow: %lu events were lost\n", (unsigned long)frame.wire_len);
            break;
        case TOWPATH_ERROR:
            fprintf(stderr, "follow: request %lu: %s\n", (unsigned long)frame.queue, strerror((int)frame.mark));
            return 1;
        }
        towpath_inspector_verdict(ring, &frame, TOWPATH_PASS);
    }
    if (got < 0)
        fprintf(stderr, "follow: %s\n", towpath_error());
    towpath_inspector_close(ring);
    return got < 0;
}
