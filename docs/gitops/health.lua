-- Health of NodeVersion, PendingNode and Plan for Argo CD. docs/gitops.md describes its use.
-- Without a status that describes the present generation an object is progressing, never healthy.
local hs = {status = "Progressing", message = "waiting for the controller"}
local status = obj.status
if status == nil then
  return hs
end

local conditions = {}
for _, c in ipairs(status.conditions or {}) do
  conditions[c.type] = c
end
local function is(kind, value)
  return conditions[kind] ~= nil and conditions[kind].status == value
end
local function result(health, message)
  return {status = health, message = message or ""}
end

if obj.kind == "Plan" then
  local own = status.constellation
  if own == nil or own.observedGeneration ~= obj.metadata.generation then
    return hs
  elseif is("Validated", "False") then
    return result("Degraded", conditions.Validated.message)
  elseif is("LatestResolved", "False") then
    return result("Degraded", conditions.LatestResolved.message)
  elseif own.counts ~= nil and own.counts.failed > 0 then
    return result("Degraded", own.counts.failed .. " of " .. own.counts.total .. " nodes failed")
  elseif is("Stalled", "True") then
    return result("Degraded", conditions.Stalled.message)
  elseif is("Complete", "True") then
    return result("Healthy", "all nodes run " .. (status.latestVersion or "the version"))
  elseif own.waiting ~= nil then
    return result("Progressing", own.waiting.message)
  elseif own.counts ~= nil then
    return result("Progressing", own.counts.done .. " of " .. own.counts.total .. " nodes are done")
  end
  return hs
end

if status.observedGeneration ~= obj.metadata.generation then
  return hs
elseif is("Reconciling", "True") then
  return result("Progressing", conditions.Reconciling.message)
elseif is("Stalled", "True") then
  return result("Degraded", conditions.Stalled.message)
elseif is("Ready", "True") then
  return result("Healthy", conditions.Ready.message)
elseif conditions.Ready ~= nil and (conditions.Ready.reason == "Paused" or conditions.Ready.reason == "Cancelled") then
  return result("Suspended", conditions.Ready.message)
elseif conditions.Ready ~= nil then
  return result("Progressing", conditions.Ready.message)
end
return hs
