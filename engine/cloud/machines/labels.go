package machines

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"constellation/engine/cloud"
)

var (
	labelName  = regexp.MustCompile(`^[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$`)
	labelHost  = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`)
	taintKinds = []string{"NoSchedule", "PreferNoSchedule", "NoExecute"}
)

// protected are the domains whose keys belong to Kubernetes and to this program. A list that could set them could
// make a worker a control plane.
var protected = []string{"kubernetes.io", "k8s.io", "edgeless.systems", "cattle.io"}

// restricted is the prefix that Kubernetes reserves for labels of owners: a kubelet cannot write them.
const restricted = "node-restriction.kubernetes.io"

// checkKey returns an error unless the list may set a label or taint with this key.
func checkKey(key string) error {
	host, name, ok := strings.Cut(key, "/")
	if !ok {
		host, name = "", key
	}
	if !labelName.MatchString(name) || ok && (len(host) > 253 || !labelHost.MatchString(host)) {
		return fmt.Errorf("%q is no key: want a name of at most 63 letters, digits, -, _ and ., if need be after a domain and /", key)
	}
	for _, d := range protected {
		if (host == d || strings.HasSuffix(host, "."+d)) && host != restricted {
			return fmt.Errorf("the key %s is reserved: keys of %s cannot be set", key, d)
		}
	}
	return nil
}

func checkValue(key, value string) error {
	if value != "" && !labelName.MatchString(value) {
		return fmt.Errorf("the value %q of %s is not valid: want at most 63 of letters, digits, dots, - and _", value, key)
	}
	return nil
}

// ParseLabels reads labels of a Node: key=value, several separated by commas. Keys of Kubernetes and of this program are
// refused, except those of node-restriction.kubernetes.io.
func ParseLabels(text string) (map[string]string, error) {
	out := map[string]string{}
	if text == "" {
		return out, nil
	}
	for _, pair := range strings.Split(text, ",") {
		key, value, ok := strings.Cut(pair, "=")
		if !ok {
			return nil, fmt.Errorf("%q is no label: want key=value", pair)
		}
		if err := errors.Join(checkKey(key), checkValue(key, value)); err != nil {
			return nil, err
		}
		if _, twice := out[key]; twice {
			return nil, fmt.Errorf("the label %s is there twice", key)
		}
		out[key] = value
	}
	return out, nil
}

// ParseTaints reads taints of a Node: key=value:Effect or key:Effect, several separated by commas. The same keys as for
// labels are refused.
func ParseTaints(text string) (out []cloud.Taint, err error) {
	if text == "" {
		return nil, nil
	}
	for _, one := range strings.Split(text, ",") {
		pair, effect, ok := strings.Cut(one, ":")
		t := cloud.Taint{Effect: effect}
		t.Key, t.Value, _ = strings.Cut(pair, "=")
		if !ok || !slices.Contains(taintKinds, effect) {
			return nil, fmt.Errorf("%q is no taint: want key=value:Effect with the effect %s", one, strings.Join(taintKinds, ", "))
		}
		if err := errors.Join(checkKey(t.Key), checkValue(t.Key, t.Value)); err != nil {
			return nil, err
		}
		if slices.ContainsFunc(out, func(x cloud.Taint) bool { return x.Key == t.Key && x.Effect == t.Effect }) {
			return nil, fmt.Errorf("the taint %s:%s is there twice", t.Key, t.Effect)
		}
		out = append(out, t)
	}
	slices.SortFunc(out, func(a, b cloud.Taint) int {
		return cmp.Or(strings.Compare(a.Key, b.Key), strings.Compare(a.Effect, b.Effect))
	})
	return out, nil
}

// LabelsText returns labels in the order of their keys, as a row of the list has them.
func LabelsText(labels map[string]string) string {
	var out []string
	for _, k := range slices.Sorted(maps.Keys(labels)) {
		out = append(out, k+"="+labels[k])
	}
	return strings.Join(out, ",")
}

// TaintsText returns taints as a row of the list has them.
func TaintsText(taints []cloud.Taint) string {
	var out []string
	for _, t := range taints {
		text := t.Key
		if t.Value != "" {
			text += "=" + t.Value
		}
		out = append(out, text+":"+t.Effect)
	}
	return strings.Join(out, ",")
}
