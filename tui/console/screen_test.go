package console

import (
	"reflect"
	"testing"
)

// Messages go to every screen that the console has.
func TestListHasEveryScreen(t *testing.T) {
	c := &console{}
	c.screens = newScreens(c)
	listed := map[any]bool{}
	for _, s := range c.list() {
		listed[s] = true
	}
	fields := reflect.ValueOf(c.screens)
	for i := range fields.NumField() {
		name := fields.Type().Field(i).Name
		if fields.Field(i).IsNil() {
			t.Errorf("newScreens does not make %s", name)
		}
	}
	if n := fields.NumField(); len(listed) != n {
		t.Errorf("list has %d screens, want all %d", len(listed), n)
	}
}
