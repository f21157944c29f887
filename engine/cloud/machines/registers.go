package machines

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
)

// RegistersConfigMap has the registers of the TPMs of enrolled machines, a [Registers] by name. The join service alone writes
// it. It is in the namespace of the operator.
const RegistersConfigMap = "constellation-registers"

// Records is the content of the ConfigMaps in which services record something about enrolled machines, each by the name of
// the machine; nil: there is no such ConfigMap.
type Records struct{ Assignments, Seen, Registers map[string]string }

// ByConfigMap returns the fields by the names of their ConfigMaps. Services may write those and not create them.
func (r *Records) ByConfigMap() map[string]*map[string]string {
	return map[string]*map[string]string{SparesConfigMap: &r.Assignments, SeenConfigMap: &r.Seen, RegistersConfigMap: &r.Registers}
}

// bootRegisters are what the firmware measures, by register, as the TCG PC Client Platform Firmware Profile assigns them.
// Later registers change with each kernel, which the owner of the machine updates.
var bootRegisters = []string{"firmware", "firmware settings", "option ROMs", "option ROM settings", "boot loader", "partition table", "platform", "Secure Boot"}

// registerBytes is how many bytes of a register are recorded. They suffice to report changes; nothing is judged by them.
const registerBytes = 8

// Registers is the record of what the TPM of a machine measured at its last recorded boot.
type Registers struct {
	// Key identifies the key that signed it, as [Machine.Key].
	Key string `json:"key"`
	// Values are registers 0 to 7, each its first 8 bytes in hex.
	Values []string `json:"values"`
	// Time is since when the machine has them.
	Time time.Time `json:"time"`
	// Changed are the registers that differed before; none: they have not changed since the key was certified.
	Changed []int `json:"changed,omitempty"`
}

// BootRegisters returns the values of a record of quoted registers. It returns nil if they are not complete.
func BootRegisters(pcrs map[uint32][]byte) []string {
	out := make([]string, len(bootRegisters))
	for i := range out {
		value := pcrs[uint32(i)]
		if len(value) < registerBytes {
			return nil
		}
		out[i] = hex.EncodeToString(value[:registerBytes])
	}
	return out
}

// Next returns the record after r of a machine that has these values at a time. Another key is another enrolment, and begins
// a new record, as the zero value does.
func (r Registers) Next(key string, values []string, now time.Time) Registers {
	next := Registers{Key: key, Values: values, Time: now.UTC().Truncate(time.Second)}
	if r.Key != key || len(r.Values) != len(values) {
		return next
	}
	for i, v := range values {
		if r.Values[i] != v {
			next.Changed = append(next.Changed, i)
		}
	}
	if next.Changed == nil {
		return r
	}
	return next
}

// String names the registers that changed, such as "0 (firmware), 7 (Secure Boot)".
func (r Registers) String() string {
	out := make([]string, len(r.Changed))
	for i, n := range r.Changed {
		out[i] = strconv.Itoa(n)
		if n >= 0 && n < len(bootRegisters) {
			out[i] += " (" + bootRegisters[n] + ")"
		}
	}
	return strings.Join(out, ", ")
}

// ChangedRegisters returns a sentence for each machine of a list whose registers changed after it was enrolled, in the order
// of names. data is the content of RegistersConfigMap.
func ChangedRegisters(i Inventory, data map[string]string) (changed []string, err error) {
	for _, name := range slices.Sorted(maps.Keys(data)) {
		var r Registers
		if err := json.Unmarshal([]byte(data[name]), &r); err != nil {
			return nil, fmt.Errorf("read the registers of %s in ConfigMap %s: it is damaged", name, RegistersConfigMap)
		}
		if len(r.Changed) > 0 && slices.ContainsFunc(i.Machines, func(m Entry) bool { return m.Name == name }) {
			changed = append(changed, fmt.Sprintf("%s has others since %s: %s", name, r.Time.UTC().Format("2006-01-02 15:04Z"), r))
		}
	}
	return changed, nil
}
