package plans

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"time"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"constellation/assets"
)

// kindTimeout bounds how long the API server may take to serve the kind.
const kindTimeout = time.Minute

// bringKind creates or updates the CRD of Plans, and returns when the API server serves it. It writes
// nothing if the CRD is up to date. It waits for an API server that does not answer.
func bringKind(ctx context.Context, access *rest.Config, log *slog.Logger) error {
	scheme := runtime.NewScheme()
	if err := apiextensionsv1.AddToScheme(scheme); err != nil {
		return fmt.Errorf("register kinds: %w", err)
	}
	want, err := planKind()
	if err != nil {
		return err
	}
	var c client.Client
	said := false
	for wait := 100 * time.Millisecond; ; wait = min(2*wait, 5*time.Second) {
		if err = nil; c == nil {
			c, err = client.New(access, client.Options{Scheme: scheme})
		}
		if err == nil {
			if err = bring(ctx, c, want, log); err == nil {
				return nil
			}
		}
		if ctx.Err() != nil {
			return nil
		}
		if apierrors.IsForbidden(err) || apierrors.IsInvalid(err) {
			return fmt.Errorf("install the kind Plan: %w", err)
		}
		if !said {
			log.Info("kind Plan not served yet", "err", err)
			said = true
		}
		select {
		case <-ctx.Done():
		case <-time.After(wait):
		}
	}
}

// planKind returns the embedded CRD of Plans.
func planKind() (*apiextensionsv1.CustomResourceDefinition, error) {
	var out apiextensionsv1.CustomResourceDefinition
	if err := yaml.UnmarshalStrict(assets.PlanKind(), &out); err != nil {
		return nil, fmt.Errorf("read the kind Plan: %w", err)
	}
	return &out, nil
}

func bring(ctx context.Context, c client.Client, want *apiextensionsv1.CustomResourceDefinition, log *slog.Logger) error {
	ctx, cancel := context.WithTimeout(ctx, kindTimeout)
	defer cancel()
	var is apiextensionsv1.CustomResourceDefinition
	err := c.Get(ctx, client.ObjectKeyFromObject(want), &is)
	if err != nil && !apierrors.IsNotFound(err) {
		return err
	}
	if err != nil || !serves(&is, want) {
		body, err := json.Marshal(want)
		if err != nil {
			return err
		}
		// By server-side apply, because only then RBAC can restrict the creation to one name.
		is = apiextensionsv1.CustomResourceDefinition{ObjectMeta: want.ObjectMeta}
		if err := c.Patch(ctx, &is, client.RawPatch("application/apply-patch+yaml", body), client.FieldOwner("constellation-plans"), client.ForceOwnership); err != nil {
			return err
		}
		log.Info("kind installed", "kind", want.Name)
	}
	for _, cond := range is.Status.Conditions {
		if cond.Type == apiextensionsv1.Established && cond.Status == apiextensionsv1.ConditionTrue {
			// A busy API server sets Established before its discovery lists the kind.
			_, err := c.RESTMapper().RESTMapping(schema.GroupKind{Group: want.Spec.Group, Kind: want.Spec.Names.Kind}, want.Spec.Versions[0].Name)
			return err
		}
	}
	return fmt.Errorf("kind %s is not established yet", want.Name)
}

// serves reports whether a CRD has the required schema and columns. Other users of Plans may have
// added versions, labels and annotations.
func serves(is, want *apiextensionsv1.CustomResourceDefinition) bool {
	w := want.Spec.Versions[0]
	for _, v := range is.Spec.Versions {
		if v.Name == w.Name {
			return v.Served && apiequality.Semantic.DeepEqual(v.Schema, w.Schema) && apiequality.Semantic.DeepEqual(v.AdditionalPrinterColumns, w.AdditionalPrinterColumns) &&
				v.Subresources != nil && v.Subresources.Status != nil
		}
	}
	return false
}
