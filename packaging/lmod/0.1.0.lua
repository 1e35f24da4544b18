-- Modulefile for Lmod: copy to MODULEPATH/hvdtrain/0.1.0.lua and set `root` to the environment
-- in which hvdtrain and Horovod are installed, and `mpi` to the module with which Horovod was built.
local root = "/opt/hvdtrain/0.1.0"
local mpi = "openmpi"

help([[
Training for PyTorch on clusters that run Horovod and MPI.
  horovodrun -np 2 hvdtrain train --config gpt-nano
]])
whatis("Name: hvdtrain")
whatis("Version: 0.1.0")
whatis("Description: fault-tolerant training for PyTorch with Horovod and MPI")

conflict("hvdtrain")
depends_on(mpi)
prepend_path("PATH", pathJoin(root, "bin"))

if mode() == "load" and not isFile(pathJoin(root, "bin", "hvdtrain")) then
    LmodError(root .. " has no bin/hvdtrain: set `root` in " .. myFileName())
end
