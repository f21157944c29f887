package machines_test

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"
	"time"

	"constellation/engine/cloud/machines"
)

func TestRegisters(t *testing.T) {
	now := time.Date(2026, 11, 28, 1, 2, 3, 0, time.UTC)
	pcrs := map[uint32][]byte{}
	for i := range uint32(16) {
		pcrs[i] = []byte(strings.Repeat(string(rune('a'+i)), 32))
	}
	first := machines.Registers{}.Next("key", machines.BootRegisters(pcrs), now)
	if len(first.Values) != 8 || first.Values[7] != "6868686868686868" || first.Changed != nil || !first.Time.Equal(now) {
		t.Fatalf("first record: %+v", first)
	}
	if again := first.Next("key", machines.BootRegisters(pcrs), now.Add(time.Hour)); !reflect.DeepEqual(again, first) {
		t.Errorf("the same boot: %+v, want %+v", again, first)
	}
	pcrs[9] = []byte(strings.Repeat("k", 32)) // a kernel
	if again := first.Next("key", machines.BootRegisters(pcrs), now.Add(time.Hour)); !reflect.DeepEqual(again, first) {
		t.Errorf("another kernel: %+v, want %+v", again, first)
	}
	pcrs[0], pcrs[7] = []byte(strings.Repeat("x", 32)), []byte(strings.Repeat("y", 32))
	changed := first.Next("key", machines.BootRegisters(pcrs), now.Add(time.Hour))
	if changed.String() != "0 (firmware), 7 (Secure Boot)" || !changed.Time.Equal(now.Add(time.Hour)) {
		t.Errorf("other firmware: %+v", changed)
	}
	if again := changed.Next("another key", machines.BootRegisters(pcrs), now); again.Changed != nil {
		t.Errorf("enrolled again: %+v", again)
	}
	delete(pcrs, 3)
	if v := machines.BootRegisters(pcrs); v != nil {
		t.Errorf("without register 3: %q", v)
	}

	list := machines.Inventory{Machines: []machines.Entry{{Name: "a"}, {Name: "b"}}}
	data := map[string]string{}
	for name, r := range map[string]machines.Registers{"a": changed, "b": first, "removed": changed} {
		b, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		data[name] = string(b)
	}
	got, err := machines.ChangedRegisters(list, data)
	if want := []string{"a has others since 2026-11-28 02:02Z: 0 (firmware), 7 (Secure Boot)"}; err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got %q, %v, want %q", got, err, want)
	}
	data["b"] = "{"
	if _, err := machines.ChangedRegisters(list, data); err == nil || !strings.Contains(err.Error(), "registers of b") {
		t.Errorf("a damaged record: %v", err)
	}
}
