package support

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
)

// addJSON adds a value as JSON.
func (c *collector) addJSON(path, source string, v any) {
	b, err := encode(v)
	if err != nil {
		c.missing(path, source, err.Error(), "")
		return
	}
	c.add(path, source, b, "", nil)
}

// annotationDomains are those of Kubernetes and of programs that a cluster of ours has. Annotations of other domains can hold anything.
var annotationDomains = []string{"kubernetes.io", "k8s.io", "edgeless.systems", "cattle.io", "helm.sh"}

const lastApplied = "kubectl.kubernetes.io/last-applied-configuration"

// cleanObject leaves out fields of an object that can have a secret, and large fields without use. left counts the former by kind.
func (c *collector) cleanObject(l List, o map[string]any, left map[string]int) {
	if m, ok := o["metadata"].(map[string]any); ok {
		delete(m, "managedFields")
	}
	switch l.Resource {
	case "configmaps":
		cleanConfigMap(o, left)
	case "certificatesigningrequests":
		for _, at := range []struct{ of, name string }{{"spec", "request"}, {"status", "certificate"}} {
			if m, ok := o[at.of].(map[string]any); ok && m[at.name] != nil {
				m[at.name] = leftOut
			}
		}
	}
	cleanFields(o, left)
}

// ourConfigMap reports whether a ConfigMap is written by programs of ours, or by kubeadm for them.
func ourConfigMap(namespace, name string) bool {
	if namespace == ours {
		return name != "kube-root-ca.crt"
	}
	return name == "join-config" || name == "k8s-version" || name == "kubeadm-config" || name == "kubelet-config" || strings.HasPrefix(name, "k8s-components-") || strings.HasPrefix(name, "constellation-")
}

// cleanConfigMap leaves out the values of a ConfigMap of another program.
func cleanConfigMap(o map[string]any, left map[string]int) {
	mine := ourConfigMap(text(o, "metadata", "namespace"), text(o, "metadata", "name"))
	for _, of := range []string{"data", "binaryData"} {
		m, ok := o[of].(map[string]any)
		if !ok || mine && of == "data" {
			continue
		}
		for k, v := range m {
			m[k] = fmt.Sprintf("(left out: %d bytes)", len(fmt.Sprint(v)))
			left["value of a ConfigMap"]++
		}
	}
}

// cleanFields leaves out fields by their names, at any depth.
func cleanFields(v any, left map[string]int) {
	switch v := v.(type) {
	case []any:
		for _, x := range v {
			cleanFields(x, left)
		}
	case map[string]any:
		for k, x := range v {
			switch k {
			case "annotations":
				cleanAnnotations(x, left)
			case "caBundle":
				v[k] = leftOut
			case "env", "envs", "httpHeaders":
				cleanValues(x, "value of a variable or header", left)
			case "stringData":
				v[k] = leftOut
				left["field "+k]++
			default:
				if s, ok := x.(string); ok && s != "" && secretField.MatchString(k) {
					v[k] = leftOut
					left["field "+k]++
				}
			}
		}
		for _, x := range v {
			cleanFields(x, left)
		}
	}
}

// cleanAnnotations leaves out the values of annotations of other programs, and copies of objects.
func cleanAnnotations(v any, left map[string]int) {
	m, ok := v.(map[string]any)
	if !ok {
		return
	}
	for k := range m {
		domain, _, _ := strings.Cut(k, "/")
		known := slices.ContainsFunc(annotationDomains, func(d string) bool { return domain == d || strings.HasSuffix(domain, "."+d) })
		if !known || k == lastApplied {
			m[k] = leftOut
			left["annotation"]++
		}
	}
}

// cleanValues leaves out the field value of each element of a list.
func cleanValues(v any, kind string, left map[string]int) {
	list, _ := v.([]any)
	for _, x := range list {
		if m, ok := x.(map[string]any); ok && m["value"] != nil {
			m["value"] = leftOut
			left[kind]++
		}
	}
}

// cleanStrings removes secrets that the scanner finds in the texts of a value. In the JSON of the value, they can be escaped.
func (c *collector) cleanStrings(v any, left map[string]int) any {
	switch v := v.(type) {
	case string:
		b, counts := c.scan.Redact([]byte(v))
		for kind, n := range counts {
			left[kind] += n
		}
		if len(counts) > 0 {
			return string(b)
		}
	case []any:
		for i, x := range v {
			v[i] = c.cleanStrings(x, left)
		}
	case map[string]any:
		for k, x := range v {
			v[k] = c.cleanStrings(x, left)
		}
	case json.Number:
	}
	return v
}
