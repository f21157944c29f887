package release

import (
	"bytes"
	"encoding/binary"
	"errors"
	"strings"
	"testing"
)

func TestEnrolmentProgramsCarryKeys(t *testing.T) {
	key := newTestKey(t, "builder")
	agent := []byte("\x7fELF agent")
	whole, err := Enrolment(agent, key.PEM())
	if err != nil {
		t.Fatal(err)
	}
	program, keys, err := SplitEnrolment(whole)
	if err != nil || !bytes.Equal(program, agent) || !bytes.Equal(keys, key.PEM()) {
		t.Errorf("split into %q and %q, %v", program, keys, err)
	}
	if _, err := Enrolment(whole, key.PEM()); err == nil {
		t.Error("an enrolment program was taken for an agent")
	}
	for _, keys := range []string{"", "no PEM"} {
		if _, err := Enrolment(agent, []byte(keys)); err == nil {
			t.Errorf("the keys %q were taken", keys)
		}
	}
	long := append(binary.BigEndian.AppendUint64(append([]byte{}, agent...), 1<<40), enrolmentMagic...)
	for name, b := range map[string][]byte{
		"an agent": agent, "nothing": nil, "an end alone": []byte(enrolmentMagic), "more keys than bytes": long,
		"keys that were altered": []byte(strings.Replace(string(whole), "PUBLIC", "PUBLIK", 1)),
		"an end that was cut":    whole[:len(whole)-1],
	} {
		if _, _, err := SplitEnrolment(b); !errors.Is(err, ErrNoEnrolment) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
