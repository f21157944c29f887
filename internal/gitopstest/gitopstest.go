// Package gitopstest evaluates the health of objects as GitOps tools do, for tests: kstatus of Flux,
// and Argo CD's script.
package gitopstest

import (
	"encoding/json"
	"os"
	"testing"

	"github.com/fluxcd/cli-utils/pkg/kstatus/status"
	lua "github.com/yuin/gopher-lua"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// Kstatus returns what kstatus computes of an object: InProgress, Current, Failed and so on.
func Kstatus(t testing.TB, object any) string {
	t.Helper()
	r, err := status.Compute(&unstructured.Unstructured{Object: plain(t, object)})
	if err != nil {
		t.Fatal(err)
	}
	return r.Status.String()
}

// Argo runs a health script on an object as Argo CD does, with the libraries that it opens. It
// returns status and message.
func Argo(t testing.TB, script string, object any) (health, message string) {
	t.Helper()
	b, err := os.ReadFile(script)
	if err != nil {
		t.Fatal(err)
	}
	l := lua.NewState(lua.Options{SkipOpenLibs: true})
	defer l.Close()
	for name, open := range map[string]lua.LGFunction{lua.LoadLibName: lua.OpenPackage, lua.BaseLibName: lua.OpenBase, lua.TabLibName: lua.OpenTable, lua.StringLibName: lua.OpenString} {
		if err := l.CallByParam(lua.P{Fn: l.NewFunction(open), NRet: 0, Protect: true}, lua.LString(name)); err != nil {
			t.Fatal(err)
		}
	}
	l.SetGlobal("obj", value(l, plain(t, object)))
	if err := l.DoString(string(b)); err != nil {
		t.Fatal(err)
	}
	out, ok := l.Get(-1).(*lua.LTable)
	if !ok {
		t.Fatalf("%s returns %s, want a table", script, l.Get(-1).Type())
	}
	return lua.LVAsString(out.RawGetString("status")), lua.LVAsString(out.RawGetString("message"))
}

// plain returns an object as a server sends it.
func plain(t testing.TB, object any) map[string]any {
	t.Helper()
	b, err := json.Marshal(object)
	if err != nil {
		t.Fatal(err)
	}
	out := &unstructured.Unstructured{}
	if err := out.UnmarshalJSON(b); err != nil {
		t.Fatal(err)
	}
	return out.Object
}

// value converts a value of JSON.
func value(l *lua.LState, v any) lua.LValue {
	switch v := v.(type) {
	case bool:
		return lua.LBool(v)
	case string:
		return lua.LString(v)
	case int64:
		return lua.LNumber(v)
	case float64:
		return lua.LNumber(v)
	case []any:
		t := l.NewTable()
		for _, e := range v {
			t.Append(value(l, e))
		}
		return t
	case map[string]any:
		t := l.NewTable()
		for k, e := range v {
			t.RawSetString(k, value(l, e))
		}
		return t
	}
	return lua.LNil
}
