// An inspector with a callback, in the form of a program that uses a Go package for NFQUEUE: it drops every packet whose payload contains a
// word.
//
//	go build -o callback ./examples/callback
//	towpath replay capture.pcap --rules rules.ipfw --queue 1="./callback password"
package main

import (
	"bytes"
	"context"
	"log"
	"os"

	"github.com/towpath/towpath-go"
)

func main() {
	log.SetFlags(0)
	if len(os.Args) != 2 || os.Args[1] == "" {
		log.Fatal("usage: callback WORD")
	}
	word := []byte(os.Args[1])
	queue, err := towpath.AttachInspector(towpath.InspectorConfig{})
	if err != nil {
		log.Fatal(err)
	}
	defer queue.Close()

	fn := func(packet towpath.Attribute) int {
		verdict := towpath.Pass
		if bytes.Contains(packet.Payload, word) {
			verdict = towpath.Drop
		}
		if err := queue.SetVerdict(packet.PacketID, verdict); err != nil {
			log.Print(err)
			return 1
		}
		return 0
	}
	errfn := func(err error) int {
		log.Print(err)
		return 1
	}
	if err := queue.Register(context.Background(), fn, errfn); err != nil {
		log.Fatal(err)
	}
}
