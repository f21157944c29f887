package main

import (
	"bytes"
	"embed"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"

	"gopkg.in/yaml.v3"

	"constellation/assets"
	"constellation/assets/render"
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

// kustomization returns the files for kustomize: the kinds of a chart, and what the chart renders with
// its defaults. For Plans they are a base. For the operator they are a Component, because its chart
// has no default for the cloud: see cloudComponent.
func kustomization(name, release string, files []assets.File) ([]assets.File, error) {
	values := map[string]any{"release": release}
	var cloud map[string]any
	if name == assets.PlansChart {
		values = map[string]any{"namespace": map[string]any{"create": true}}
	} else {
		cloud = map[string]any{"provider": unset, "metadataURL": unset, "cloudURL": unset}
	}
	rendered, err := render.Chart(name, release, namespaces[name], cloud, values)
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
	out = append(out, assets.File{Name: kustomizationFile, Data: []byte(index)})
	if cloud == nil {
		return out, nil
	}
	for i := range out {
		out[i].Name = "base/" + out[i].Name
	}
	component, err := cloudComponent(rendered)
	return append(out, assets.File{Name: kustomizationFile, Data: component}), err
}

const kustomizationFile = "kustomization.yaml"

// unset stands for values of the cloud in the base of the operator. No cloud has this name.
const unset = "unset"

// cloudConfig is the ConfigMap with values of the cloud that users of the Component supply. Each of
// its keys belongs to an argument of the operator.
const cloudConfig = "constellation-cloud"

var cloudArguments = []struct{ key, flag string }{{"provider", "--provider="}, {"metadataURL", "--metadata="}, {"cloudURL", "--cloud="}}

// cloudComponent returns a Component that sets the values of the cloud in a rendered chart of the operator. Kustomize refuses
// to build it without the ConfigMap, and to use it as a base.
func cloudComponent(rendered []byte) ([]byte, error) {
	args, err := operatorArguments(rendered)
	if err != nil {
		return nil, err
	}
	var b strings.Builder
	fmt.Fprintf(&b, `# Values of the cloud are in the ConfigMap %[1]s, a resource of the kustomization that
# names this Component. It never gets into the cluster:
#
#   apiVersion: v1
#   kind: ConfigMap
#   metadata:
#     name: %[1]s
#     annotations: {config.kubernetes.io/local-config: "true"}
#   data:
#     provider: NAME
#     metadataURL: ADDRESS   # "" is the default of the cloud, for this and the next one
#     cloudURL: ADDRESS
apiVersion: kustomize.config.k8s.io/v1alpha1
kind: Component
resources:
- base
replacements:
`, cloudConfig)
	for _, c := range cloudArguments {
		at := slices.Index(args, c.flag+unset)
		if at < 0 {
			return nil, fmt.Errorf("the operator has no argument %s%s", c.flag, unset)
		}
		fmt.Fprintf(&b, `- source: {kind: ConfigMap, name: %s, fieldPath: data.%s}
  targets:
  - select: {kind: Deployment, name: %s}
    fieldPaths: ["spec.template.spec.containers.[name=operator].args.%d"]
    options: {delimiter: "=", index: 1}
`, cloudConfig, c.key, operatorChart, at)
	}
	return []byte(b.String()), nil
}

// operatorArguments returns the arguments of the operator in a rendered chart.
func operatorArguments(rendered []byte) ([]string, error) {
	for d := yaml.NewDecoder(bytes.NewReader(rendered)); ; {
		var o struct {
			Kind     string
			Metadata struct{ Name string }
			Spec     struct {
				Template struct {
					Spec struct {
						Containers []struct {
							Name string
							Args []string
						}
					}
				}
			}
		}
		if err := d.Decode(&o); errors.Is(err, io.EOF) {
			return nil, fmt.Errorf("no Deployment %s is rendered", operatorChart)
		} else if err != nil {
			return nil, fmt.Errorf("read rendered chart: %w", err)
		}
		if o.Kind != "Deployment" || o.Metadata.Name != operatorChart {
			continue
		}
		for _, c := range o.Spec.Template.Spec.Containers {
			if c.Name == "operator" {
				return c.Args, nil
			}
		}
	}
}
