package engine

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strings"

	"constellation/engine/plan"
)

// ErrChart means that a chart does not go together with its values, or with the cluster.
var ErrChart = errors.New("the chart cannot be used as it is")

// DiffValues returns what differs between the values of a chart, sorted by path. What
// looks like a secret, by a key on its way or by itself, is hidden.
func DiffValues(from, to map[string]any) (out []plan.ValueChange) {
	a, b := map[string]value{}, map[string]value{}
	flatten(a, "", from, false)
	flatten(b, "", to, false)
	paths := slices.AppendSeq(slices.Collect(maps.Keys(a)), maps.Keys(b))
	slices.Sort(paths)
	for _, p := range slices.Compact(paths) {
		x, y := a[p], b[p]
		if x.text == y.text {
			continue
		}
		v := plan.ValueChange{Path: p, From: short(x.text), To: short(y.text)}
		if x.secret || y.secret {
			v = plan.ValueChange{Path: p, Hidden: true}
		}
		out = append(out, v)
	}
	return out
}

// value is a leaf of values: JSON, and whether nobody may see it.
type value struct {
	text   string
	secret bool
}

// flatten writes the leaves of v to out by path.
func flatten(out map[string]value, path string, v any, secret bool) {
	switch v := v.(type) {
	case map[string]any:
		named, _ := v["name"].(string) // an entry of env: {name: PASSWORD, value: ...}
		for k, x := range v {
			flatten(out, strings.TrimPrefix(path+"."+k, "."), x, secret || secretKey(k) || k == "value" && secretKey(named))
		}
		if len(v) == 0 && path != "" {
			out[path] = value{"{}", secret}
		}
	case []any:
		for i, x := range v {
			flatten(out, fmt.Sprintf("%s[%d]", path, i), x, secret)
		}
		if len(v) == 0 {
			out[path] = value{"[]", secret}
		}
	default:
		if v != nil && reflect.TypeOf(v).Kind() == reflect.Slice { // values of our own are typed
			if b, err := json.Marshal(v); err == nil {
				var any []any
				if json.Unmarshal(b, &any) == nil {
					flatten(out, path, any, secret)
					return
				}
			}
		}
		b, err := json.Marshal(v)
		if err != nil {
			b = []byte("?")
		}
		text, _ := v.(string)
		out[path] = value{string(b), secret || secretValue(text)}
	}
}

var (
	secretKeyRE   = regexp.MustCompile(`(?i)pass(word|wd|phrase)|^pass$|secret|token|credential|private|salt|htpasswd|connection[-_]?string|(^|[-_.])(dsn|auth|key|pwd)$|(api|access|encryption|signing|license|master|account|storage|shared)[-_]?key`)
	secretValueRE = regexp.MustCompile(`PRIVATE KEY-----|://[^/@\s]+@|^(Bearer|Basic) |^eyJ[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.|^(gh[pousr]_|github_pat_|glpat-|xox[a-z]-|AKIA)`)
)

func secretKey(k string) bool {
	// tlsKey and sshKey, but not keyring and monkey
	return secretKeyRE.MatchString(k) || strings.HasSuffix(k, "Key")
}

func secretValue(s string) bool { return secretValueRE.MatchString(s) }

// short keeps a value on a line.
func short(s string) string {
	var f TextFilter
	s = strings.Map(func(r rune) rune {
		if f.Shows(r) {
			return r
		}
		return '?'
	}, s)
	if r := []rune(s); len(r) > 120 {
		return string(r[:119]) + "…"
	}
	return s
}
