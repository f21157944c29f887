package main

import (
	"bytes"
	"embed"
	"errors"
	"fmt"
	"path"
	"strings"

	"gopkg.in/yaml.v3"

	"constellation/assets"
	"constellation/assets/render"
	"constellation/engine/cloud/providers"
)

// operatorChart is the chart of the operator. The engine installs it without what is added here.
const operatorChart = "constellation-operator"

// published are the files that only the published chart of the operator has.
//
//go:embed published
var published embed.FS

// publish adds to the chart of the operator what others need: the kinds, which the engine applies
// itself, a README, metadata for Artifact Hub and Helm, and the release as the default.
func publish(files []assets.File, release string) ([]assets.File, error) {
	kinds, err := assets.CRDsFor(release)
	if err != nil {
		return nil, err
	}
	readme, err := published.ReadFile("published/README.md")
	if err != nil {
		return nil, err
	}
	metadata, err := published.ReadFile("published/annotations.yaml")
	if err != nil {
		return nil, err
	}
	described, err := describeKinds(kinds)
	if err != nil {
		return nil, err
	}
	out := []assets.File{{Name: "README.md", Data: readme}}
	for _, f := range files {
		switch f.Name {
		case "Chart.yaml":
			f.Data = bytes.Join([][]byte{f.Data, metadata, described}, nil)
		case "values.yaml":
			const empty = "\nrelease: \"\"\n"
			if !bytes.Contains(f.Data, []byte(empty)) {
				return nil, errors.New("values.yaml has no empty release")
			}
			f.Data = bytes.Replace(f.Data, []byte(empty), []byte("\nrelease: "+release+"\n"), 1)
		}
		out = append(out, f)
	}
	for _, k := range kinds {
		out = append(out, assets.File{Name: "crds/" + k.Name + ".yaml", Data: k.Data})
	}
	return out, nil
}

// describeKinds returns the annotation by which Artifact Hub lists the kinds of a chart.
func describeKinds(kinds []assets.File) ([]byte, error) {
	type kind struct {
		Kind        string `yaml:"kind"`
		Version     string `yaml:"version"`
		Name        string `yaml:"name"`
		DisplayName string `yaml:"displayName"`
		Description string `yaml:"description"`
	}
	var all []kind
	for _, k := range kinds {
		var crd struct {
			Spec struct {
				Names    struct{ Kind string }
				Versions []struct {
					Name   string
					Schema struct {
						OpenAPIV3Schema struct{ Description string } `yaml:"openAPIV3Schema"`
					}
				}
			}
		}
		if err := yaml.Unmarshal(k.Data, &crd); err != nil {
			return nil, fmt.Errorf("read %s: %w", k.Name, err)
		}
		if len(crd.Spec.Versions) == 0 {
			return nil, fmt.Errorf("read %s: no version", k.Name)
		}
		v := crd.Spec.Versions[0]
		about, _, _ := strings.Cut(strings.Join(strings.Fields(v.Schema.OpenAPIV3Schema.Description), " "), ". ")
		all = append(all, kind{crd.Spec.Names.Kind, v.Name, k.Name, crd.Spec.Names.Kind, strings.TrimSuffix(about, ".")})
	}
	list, err := yaml.Marshal(all)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	b.WriteString("  artifacthub.io/crds: |\n")
	for line := range strings.Lines(string(list)) {
		b.WriteString("    " + line)
	}
	return b.Bytes(), nil
}

// namespaces are where the charts are installed.
var namespaces = map[string]string{assets.PlansChart: "system-upgrade", operatorChart: "constellation-system"}

// kustomization returns the files of a base for kustomize: the kinds of a chart, and what the chart
// renders with its defaults.
func kustomization(name, release string, files []assets.File) ([]assets.File, error) {
	values := map[string]any{"release": release}
	if name == assets.PlansChart {
		values = map[string]any{"namespace": map[string]any{"create": true}}
	}
	rendered, err := render.Chart(name, release, namespaces[name], providers.LocalValues(), values)
	if err != nil {
		return nil, err
	}
	index := "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources:\n"
	out := []assets.File{{Name: "manifests.yaml", Data: rendered}}
	for _, f := range files {
		if path.Dir(f.Name) == "crds" {
			out = append(out, f)
		}
	}
	for _, f := range out {
		index += "- " + f.Name + "\n"
	}
	return append(out, assets.File{Name: "kustomization.yaml", Data: []byte(index)}), nil
}
