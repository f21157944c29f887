package gcptest

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"constellation/internal/testneeds"
)

var update = flag.Bool("update", false, "write methods.json")

// structural are the keys of the document that the gate uses.
var structural = map[string]bool{
	"id": true, "httpMethod": true, "flatPath": true, "parameters": true, "request": true, "response": true, "scopes": true, "$ref": true, "type": true, "format": true,
	"pattern": true, "minimum": true, "maximum": true, "enum": true, "location": true, "required": true, "repeated": true, "properties": true, "items": true,
	"additionalProperties": true, "annotations": true,
}

// named are the keys whose values have names of the API as keys.
var named = map[string]bool{"parameters": true, "properties": true}

// prune removes all but the structure. all keeps the keys of v itself.
func prune(v any, all bool) any {
	switch x := v.(type) {
	case map[string]any:
		out := map[string]any{}
		for key, value := range x {
			if all || structural[key] {
				out[key] = prune(value, !all && named[key])
			}
		}
		return out
	case []any:
		for n := range x {
			x[n] = prune(x[n], false)
		}
	}
	return v
}

// references adds the types that v refers to, and those that they refer to.
func references(v any, types, found map[string]any) {
	switch x := v.(type) {
	case map[string]any:
		if name, ok := x["$ref"].(string); ok && found[name] == nil {
			found[name] = prune(types[name], false)
			references(found[name], types, found)
		}
		for _, value := range x {
			references(value, types, found)
		}
	case []any:
		for _, value := range x {
			references(value, types, found)
		}
	}
}

func TestMethodsAreCurrent(t *testing.T) {
	testneeds.Tree()
	dir, err := exec.CommandContext(t.Context(), "go", "list", "-m", "-f", "{{.Dir}}", "google.golang.org/api").Output()
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(filepath.Join(strings.TrimSpace(string(dir)), "compute", "v1", "compute-api.json"))
	if err != nil {
		t.Fatal(err)
	}
	var whole struct {
		BasePath   string         `json:"basePath"`
		Parameters map[string]any `json:"parameters"`
		Schemas    map[string]any `json:"schemas"`
		Resources  map[string]struct {
			Methods map[string]any `json:"methods"`
		} `json:"resources"`
	}
	if err := json.Unmarshal(b, &whole); err != nil {
		t.Fatal(err)
	}
	types := map[string]any{}
	resources := map[string]map[string]map[string]any{}
	for id := range handlers {
		resource, verb, _ := strings.Cut(id, ".")
		m := whole.Resources[resource].Methods[verb]
		if m == nil {
			t.Fatalf("the API has no method %s", id)
		}
		if resources[resource] == nil {
			resources[resource] = map[string]map[string]any{"methods": {}}
		}
		resources[resource]["methods"][verb] = prune(m, false)
		references(m, whole.Schemas, types)
	}
	want, err := json.MarshalIndent(map[string]any{"basePath": whole.BasePath, "parameters": prune(whole.Parameters, true), "schemas": types, "resources": resources}, "", "")
	if err != nil {
		t.Fatal(err)
	}
	want = append(want, '\n')
	if *update {
		if err := os.WriteFile("methods.json", want, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if !bytes.Equal(want, methodsJSON) {
		t.Error("methods.json is not that of the module: run `go test ./engine/cloud/gcp/gcptest -run TestMethodsAreCurrent -update`")
	}
}
