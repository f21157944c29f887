package engine

import (
	"fmt"

	"constellation/assets"
	"constellation/bootstrapper/initproto"
	"constellation/engine/cloud/providers"
	"constellation/engine/kms"
	"constellation/engine/plan"
	"constellation/engine/release"
	"constellation/engine/version"
	"constellation/engine/workspace"
)

// encrypts reports whether the cluster that init makes encrypts Secrets in etcd.
func (i *initRun) encrypts(r *plan.Reporter) (bool, error) {
	from, _ := providers.Named(i.state.Infrastructure.Provider)
	if wanted := i.config.EncryptSecrets; !from.SealsKeys || wanted != nil && !*wanted {
		return false, nil
	}
	if ok, err := handsKeysOver(i.release, i.release.Version); ok || err != nil {
		return ok, err
	}
	// Without keys, further control planes could not serve Secrets.
	r.Log("engine", "", "warn", fmt.Sprintf("Secrets are stored in etcd without encryption: the join service of release %s hands no keys over", i.release.Version))
	return false, nil
}

// handsKeysOver reports whether the join service of a version gives control planes the keys of the key service. r names its chart.
func handsKeysOver(r *release.Release, v version.Version) (bool, error) {
	s, ok := r.Service(release.JoinService)
	if !ok {
		return false, nil
	}
	files, err := assets.ChartFor(s.Chart, v.String())
	if err != nil {
		return false, err
	}
	return assets.HasValue(files, "joinservice", "kms"), nil
}

// firstKMSKeys returns the keys of a new cluster. One with the master secret of a lost cluster gets the same keys.
func firstKMSKeys(m workspace.MasterSecret) ([]byte, error) {
	k, err := kms.First(m.KMSSecret(), max(m.KMS, 1))
	if err != nil {
		return nil, err
	}
	return k.Encode()
}

// storeEncryption records whether the first node encrypts Secrets, which all control planes then have to.
func (i *initRun) storeEncryption(r *plan.Reporter, s *initproto.Success) error {
	if len(i.kmsKeys) > 0 && !s.EncryptsSecrets {
		r.Log("engine", s.NodeName, "warn", "Secrets are stored in etcd without encryption: the image of the machine has no key service")
	}
	v := &i.state.ClusterValues
	if v.EncryptsSecrets == s.EncryptsSecrets {
		return nil
	}
	v.EncryptsSecrets = s.EncryptsSecrets
	return i.e.ws.WriteState(i.state)
}
