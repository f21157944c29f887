package evidence

import (
	"bytes"
	"crypto"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	mr "github.com/google/go-eventlog/register"
	"github.com/google/go-eventlog/tcg"
	"github.com/google/go-eventlog/testdata"
)

// realLogs are logs of real machines, as go-eventlog carries them for its tests.
func realLogs() map[string][]byte {
	return map[string][]byte{
		"RHEL 8":                 testdata.Rhel8EventLog,
		"Ubuntu 18.04, SEV":      testdata.Ubuntu1804AmdSevEventLog,
		"Ubuntu 21.04":           testdata.Ubuntu2104NoSecureBootEventLog,
		"Ubuntu 24.04, SEV-SNP":  testdata.Ubuntu2404AmdSevSnpEventLog,
		"Ubuntu 24.04, TDX":      testdata.Ubuntu2404IntelTdxA4HighGpu8GEventLog,
		"COS 121":                testdata.Cos121AmdSevEventLog,
		"Arch Linux workstation": testdata.ArchLinuxWorkstationEventLog,
		"GDC host":               testdata.GdcHost,
	}
}

// mrs presents registers to go-eventlog.
func mrs(pcrs map[uint32][]byte) []mr.MR {
	var out []mr.MR
	for i, v := range pcrs {
		out = append(out, mr.PCR{Index: int(i), Digest: v, DigestAlg: crypto.SHA256})
	}
	return out
}

// TestRealLogs compares what we make of the logs of real machines with what
// go-eventlog does.
func TestRealLogs(t *testing.T) {
	for name, log := range realLogs() {
		t.Run(name, func(t *testing.T) {
			pcrs, err := replayLog(log)
			if err != nil {
				t.Fatal(err)
			}
			if len(pcrs) < 5 {
				t.Errorf("only %d registers are covered", len(pcrs))
			}
			events, err := tcg.ParseAndReplay(log, mrs(pcrs), tcg.ParseOpts{})
			if err != nil || len(events) < 10 {
				t.Errorf("go-eventlog replays it otherwise: %d events, %v", len(events), err)
			}
			t.Logf("%d bytes, %d events, %d registers", len(log), len(events), len(pcrs))
		})
	}
}

// TestOurLog reads a log that we wrote with go-eventlog.
func TestOurLog(t *testing.T) {
	log := newEventLog()
	for _, e := range boot() {
		log = appendEvent(log, e)
	}
	pcrs, err := replayLog(log)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(PredictPCRs(boot()), pcrs); d != "" {
		t.Errorf("replayed, against predicted (-want +got):\n%s", d)
	}
	events, err := tcg.ParseAndReplay(log, mrs(pcrs), tcg.ParseOpts{})
	if err != nil {
		t.Fatal(err)
	}
	if len(events) != len(boot()) {
		t.Fatalf("go-eventlog finds %d events, want %d", len(events), len(boot()))
	}
	for i, e := range boot() {
		if uint32(events[i].MRIndex()) != e.PCR || !bytes.Equal(events[i].ReplayedDigest(), e.Digest) || string(events[i].RawData()) != e.Description {
			t.Errorf("event %d is read as %v", i, events[i])
		}
	}
}

func TestLogsAreRefused(t *testing.T) {
	good := newEventLog()
	event := func(edit func([]byte)) []byte {
		e := appendEvent(nil, boot()[0])
		edit(e)
		return append(bytes.Clone(good), e...)
	}
	header := func(edit func([]byte)) []byte {
		h := bytes.Clone(good)
		edit(h)
		return h
	}
	for _, tt := range []struct {
		name string
		log  []byte
		text string
	}{
		{name: "a single byte", log: []byte{1}, text: "first event is cut off"},
		{name: "a log from before there were algorithms", log: testdata.Debian10EventLog, text: "not in the crypto-agile format"},
		{name: "an opening event that is measured", log: header(func(h []byte) { h[4] = 1 }), text: "not in the crypto-agile format"},
		{name: "an opening event that is longer than the log", log: header(func(h []byte) { h[28] = 200 }), text: "first event is cut off"},
		{name: "more algorithms than it has", log: header(func(h []byte) { h[56] = 2 }), text: "0x0000 in it have 0 bytes"},
		{name: "a hundred algorithms", log: header(func(h []byte) { h[56] = 100 }), text: "100 digest algorithms"},
		{name: "an algorithm without size", log: header(func(h []byte) { h[62] = 0 }), text: "have 0 bytes"},
		{name: "an algorithm of 65 bytes", log: header(func(h []byte) { h[62] = 65 }), text: "have 65 bytes"},
		{name: "SHA-256 of 20 bytes", log: header(func(h []byte) { h[62] = 20 }), text: "no SHA-256"},
		{name: "vendor information that is not there", log: header(func(h []byte) { h[64] = 9 }), text: "first event cannot be read"},
		{name: "a register that does not exist", log: event(func(e []byte) { e[0] = 24 }), text: "PCR 24"},
		{name: "two digests where one is named", log: event(func(e []byte) { e[8] = 2 }), text: "2 digests"},
		{name: "four billion digests", log: event(func(e []byte) { copy(e[8:], "\xff\xff\xff\xff") }), text: "4294967295 digests"},
		{name: "no digest", log: event(func(e []byte) { e[8] = 0 }), text: ""},
		{name: "a digest of an algorithm that is not named", log: event(func(e []byte) { e[12] = 4 }), text: "0x0004"},
		{name: "data of four billion bytes", log: event(func(e []byte) { copy(e[46:], "\xff\xff\xff\xff") }), text: "cut off"},
		{name: "an algorithm twice", log: func() []byte { // and each event with two SHA-256 digests
			h := bytes.Clone(good)
			h[28] += 4
			h[56] = 2
			return slices.Insert(h, 64, h[60:64]...)
		}(), text: "0x000b twice"},
		{name: "two SHA-256 digests", log: func() []byte {
			h := bytes.Clone(good)
			h[28] += 4
			h[56] = 2
			h = slices.Insert(h, 64, 4, 0, 20, 0)
			e := appendEvent(nil, boot()[0])
			e[8] = 2
			return append(h, slices.Insert(e, 46, e[12:46]...)...)
		}(), text: "two SHA-256 digests"},
		{name: "more events than anyone measures", log: append(bytes.Clone(good), bytes.Repeat(appendEvent(nil, MeasuredEvent{4, digest("x"), ""}), maxEvents+1)...), text: "more than 4096 events"},
		{name: "an event that is cut off", log: event(func([]byte) {})[:len(good)+20], text: "cut off"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			pcrs, err := replayLog(tt.log)
			if err == nil || !strings.Contains(err.Error(), tt.text) {
				t.Errorf("got %v, want an error with %q", err, tt.text)
			}
			if pcrs != nil {
				t.Errorf("registers came with the error: %v", pcrs)
			}
		})
	}
}

func TestEventsThatAreNotMeasured(t *testing.T) {
	noAction := func(data string) []byte {
		e := appendEvent(nil, MeasuredEvent{0, make([]byte, 32), data})
		e[4] = eventNoAction
		return e
	}
	log := append(newEventLog(), noAction("some remark")...)
	if pcrs, err := replayLog(log); err != nil || len(pcrs) != 0 {
		t.Errorf("a remark: %v, %v", pcrs, err)
	}
	log = append(log, noAction(startupLocality+"\x03")...)
	log = appendEvent(log, MeasuredEvent{0, digest("firmware"), "firmware"})
	start := make([]byte, 32)
	start[31] = 3
	if pcrs, err := replayLog(log); err != nil || !bytes.Equal(pcrs[0], extend(start, digest("firmware"))) {
		t.Errorf("startup locality: %x, %v", pcrs[0], err)
	}
	log = append(log, noAction(startupLocality+"\x04")...)
	if _, err := replayLog(log); err == nil {
		t.Error("a locality after PCR 0 was extended is accepted")
	}
}
