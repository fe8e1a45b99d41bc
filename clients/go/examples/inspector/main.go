// An inspector that drops every packet whose payload contains a word. A template for other inspectors.
//
//	go build -o inspector ./examples/inspector
//	towpath replay capture.pcap --rules rules.ipfw --queue 1="./inspector password"
package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log"
	"os"
	"os/signal"

	"github.com/towpath/towpath-go"
)

func main() {
	log.SetFlags(0)
	if len(os.Args) != 2 || os.Args[1] == "" {
		log.Fatal("usage: inspector WORD")
	}
	word := []byte(os.Args[1])
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	// Towpath starts this program and sets TOWPATH_SOCKET to the socket to attach to.
	inspector, err := towpath.AttachInspector(towpath.InspectorConfig{})
	if err != nil {
		log.Fatal(err)
	}
	defer inspector.Close()

	// Frames arrive in batches. The payload is read in place; the verdict returns the frame.
	frames := make([]towpath.Frame, 64)
	seen, dropped := 0, 0
	for {
		count, err := inspector.Recv(ctx, frames)
		if err == io.EOF {
			break
		}
		if err != nil {
			log.Fatal(err)
		}
		for i := range frames[:count] {
			verdict := towpath.Pass
			if bytes.Contains(frames[i].Payload, word) {
				verdict = towpath.Drop
				dropped++
			}
			seen++
			if err := frames[i].SetVerdict(verdict); err != nil {
				log.Fatal(err)
			}
		}
	}
	fmt.Fprintf(os.Stderr, "inspector: %d packets, %d dropped\n", seen, dropped)
}
